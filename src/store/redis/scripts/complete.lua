#!lua flags=allow-oom
-- KEYS: record, and for a large outcome the value that was laid beside it. ARGV: owner, outcome,
-- retention or '', and for a resolution the creation and the lease that were seen, else ''.
-- Applied (1), lost (0), unreadable (-1), -2 if what was laid beside is gone, or the value whose
-- outcome stands.
--
-- Every first request runs it, so it stands alone: record.lua's functions would be made anew by each
-- run, and they and their tables cost a quarter of its time.
local TIMES = '<BBI6I6I6I6I6I4I4'

local function complete()
  local value = redis.call('GET', KEYS[1])
  if not value then return 0 end
  local left = redis.call('PTTL', KEYS[1])
  if #value < 172 or left < 0 or string.sub(value, 1, 40) ~= string.sub(value, 41, 80) then
    return -1
  end
  local version, state, total, lease, expiry, retention, _, _, notes = struct.unpack(TIMES, value)
  if version ~= 1 then return -1 end
  local created, age = ARGV[4], total - left
  if state == 2 then return created == '' and value or 0 end
  if state ~= 1 or string.sub(value, 89, 104) ~= ARGV[1] then return 0 end
  if created ~= '' then
    if string.sub(value, 81, 88) ~= created or lease ~= tonumber(ARGV[5]) or lease > age then
      return 0
    end
  end
  if ARGV[3] ~= '' then
    expiry = age + tonumber(ARGV[3])
  elseif expiry <= age then
    expiry = age + retention
  end
  if expiry <= age then
    redis.call('DEL', KEYS[1])
    return 1
  end
  local outcome = #ARGV[2]
  if KEYS[2] then
    outcome = redis.call('STRLEN', KEYS[2]) - 172
    if outcome < 0 then return -2 end
  end
  local times = struct.pack(TIMES, 1, 2, expiry, lease, expiry, retention, age, outcome, notes)
  local identity, rest = string.sub(value, 81, 172), string.sub(value, 173)
  if KEYS[2] then
    redis.call('SETRANGE', KEYS[2], 0, times .. times .. identity)
    redis.call('APPEND', KEYS[2], rest)
    redis.call('PEXPIRE', KEYS[2], expiry - age)
    redis.call('RENAME', KEYS[2], KEYS[1])
  else
    local kept = times .. times .. identity .. ARGV[2] .. rest
    redis.call('SET', KEYS[1], kept, 'PX', expiry - age)
  end
  return 1
end

local reply = complete()
if KEYS[2] and reply ~= 1 then redis.call('UNLINK', KEYS[2]) end
return reply
