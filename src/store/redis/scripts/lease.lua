-- KEYS: record. ARGV: owner, the new lease or '' to end it now, grace.
local value = redis.call('GET', KEYS[1])
if not value then return LOST end
local t = read(value, redis.call('PTTL', KEYS[1]))
if not t then return UNREADABLE end
if t.state ~= STARTED or owner(value) ~= ARGV[1] then return LOST end
if ARGV[2] ~= '' then
  t.lease = t.age + tonumber(ARGV[2])
elseif t.lease > t.age then
  t.lease = t.age
else
  return APPLIED
end
local total = math.max(t.lease, t.expiry) + tonumber(ARGV[3])
redis.call('SET', KEYS[1], times(t, total) .. string.sub(value, 81), 'PX', total - t.age)
return APPLIED
