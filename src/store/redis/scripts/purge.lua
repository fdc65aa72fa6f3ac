-- KEYS: record, receipt. ARGV: number of the call. Removes it if its attempt is unknown and its time is over.
local value = redis.call('GET', KEYS[1])
local t = value and read(value, redis.call('PTTL', KEYS[1]))
if not t or t.state ~= STARTED or math.max(t.lease, t.expiry) > t.age then
  return told_before(KEYS[2], ARGV[1]) or LOST
end
redis.call('DEL', KEYS[1])
leave_receipt(KEYS[2], ARGV[1], 1)
return 1
