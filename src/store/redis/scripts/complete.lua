-- KEYS: record, and for a large outcome the value that was laid beside it. ARGV: owner, outcome,
-- retention or '', and for a resolution the creation and the lease that were seen, else ''.
-- Applied, lost, unreadable, -2 if what was laid beside is gone, or the value whose outcome stands.
local function complete()
  local value = redis.call('GET', KEYS[1])
  if not value then return LOST end
  local t = read(value, redis.call('PTTL', KEYS[1]))
  if not t then return UNREADABLE end
  if t.state == COMPLETED then return ARGV[4] == '' and value or LOST end
  if t.state ~= STARTED or owner(value) ~= ARGV[1] or not is_seen(t, value, ARGV[4], ARGV[5]) then
    return LOST
  end
  if ARGV[3] ~= '' then
    t.expiry = t.age + tonumber(ARGV[3])
  elseif t.expiry <= t.age then
    t.expiry = t.age + t.retention
  end
  if t.expiry <= t.age then
    redis.call('DEL', KEYS[1])
    return APPLIED
  end
  t.state, t.done, t.outcome = COMPLETED, t.age, #ARGV[2]
  if KEYS[2] then
    t.outcome = redis.call('STRLEN', KEYS[2]) - 172
    if t.outcome < 0 then return -2 end
    redis.call('SETRANGE', KEYS[2], 0, times(t, t.expiry) .. string.sub(value, 81, 172))
    redis.call('APPEND', KEYS[2], string.sub(value, 173))
    redis.call('PEXPIRE', KEYS[2], t.expiry - t.age)
    redis.call('RENAME', KEYS[2], KEYS[1])
  else
    local kept = string.sub(value, 81, 172) .. ARGV[2] .. string.sub(value, 173)
    redis.call('SET', KEYS[1], times(t, t.expiry) .. kept, 'PX', t.expiry - t.age)
  end
  return APPLIED
end

local reply = complete()
if KEYS[2] and reply ~= APPLIED then redis.call('UNLINK', KEYS[2]) end
return reply
