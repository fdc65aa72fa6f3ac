-- KEYS: counter of expired unknowns, receipt. ARGV: number of the call, how many may be told of. How many are.
local before = told_before(KEYS[2], ARGV[1])
if before then return before end
local owed = tonumber(redis.call('GET', KEYS[1]) or 0)
local told = math.min(owed, tonumber(ARGV[2]))
if told == owed then
  redis.call('DEL', KEYS[1])
else
  redis.call('DECRBY', KEYS[1], told)
end
leave_receipt(KEYS[2], ARGV[1], told)
return told
