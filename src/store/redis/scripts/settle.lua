-- KEYS: counter of expired unknowns. ARGV: how many may be told of. How many are.
local owed = tonumber(redis.call('GET', KEYS[1]) or 0)
local told = math.min(owed, tonumber(ARGV[1]))
if told == owed then
  redis.call('DEL', KEYS[1])
else
  redis.call('DECRBY', KEYS[1], told)
end
return told
