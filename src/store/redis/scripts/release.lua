-- KEYS: record. ARGV: owner, and for a resolution the creation and the lease that were seen, else ''.
local resolving = ARGV[2] ~= ''
local value = redis.call('GET', KEYS[1])
if not value then return resolving and LOST or APPLIED end
local t = read(value, redis.call('PTTL', KEYS[1]))
if not t then return UNREADABLE end
if owner(value) ~= ARGV[1] then return LOST end
if t.state == RELEASED then return resolving and LOST or APPLIED end
if t.state ~= STARTED or not is_seen(t, value, ARGV[2], ARGV[3]) then return LOST end
if t.expiry <= t.age then
  redis.call('DEL', KEYS[1])
  return APPLIED
end
-- The next claim begins without notes, so there is nobody left to read them.
local key = string.sub(value, 173, #value - t.notes)
t.state, t.done, t.notes = RELEASED, t.age, 0
redis.call('SET', KEYS[1], times(t, t.expiry) .. string.sub(value, 81, 172) .. key,
  'PX', t.expiry - t.age)
return APPLIED
