-- KEYS: record. {value, left}, or nothing. A transaction would be refused by a full server.
local value = redis.call('GET', KEYS[1])
return value and {value, redis.call('PTTL', KEYS[1])}
