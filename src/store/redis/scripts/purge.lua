-- KEYS: record. Removes it if its attempt is unknown and its time is over.
local value = redis.call('GET', KEYS[1])
local t = value and read(value, redis.call('PTTL', KEYS[1]))
if not t or t.state ~= STARTED or math.max(t.lease, t.expiry) > t.age then return LOST end
redis.call('DEL', KEYS[1])
return APPLIED
