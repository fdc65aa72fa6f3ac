-- KEYS: record, counter of expired unknowns. ARGV: owner, fingerprint, lease, retention, grace, rerun or
-- '', the attempt that the caller saw, the identity with the attempt after it, the key, and that
-- identity with the creation that the caller saw.
-- {code, value, left}: 0 existing, 1 afresh, 2 again, 3 takeover, 4 another attempt, 5 gone.
local value = redis.call('GET', KEYS[1])
if not value then return {5} end
local left = redis.call('PTTL', KEYS[1])
local t = read(value, left)
if not t then return {UNREADABLE} end
local lease, retention, grace = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local due = t.expiry
if t.state == STARTED then due = math.max(due, t.lease) end
local afresh = t.state == RELEASED or due <= t.age
local same = t.state == STARTED and string.sub(value, 109, 160) == ARGV[2]
local again = same and owner(value) == ARGV[1]
local over = same and t.lease <= t.age and ARGV[6] ~= ''
if not afresh and not again and not over then return {0, value, left} end
if afresh or not again then
  local seen = struct.unpack('<I4', value, 105) == tonumber(ARGV[7])
  -- A takeover keeps the creation.
  if over and not afresh then
    seen = seen and string.sub(value, 81, 88) == string.sub(ARGV[10], 1, 8)
  end
  if not seen then return {4, value, left} end
end
if afresh then
  if t.state == STARTED then
    -- Nobody will ever know how it ended: the next purge tells of it.
    redis.call('INCR', KEYS[2])
    redis.call('PEXPIRE', KEYS[2], grace)
  end
  local total = math.max(lease, retention) + grace
  local fresh = { state = STARTED, lease = lease, expiry = retention, retention = retention,
    done = 0, outcome = 0, notes = 0 }
  redis.call('SET', KEYS[1], times(fresh, total) .. ARGV[8] .. ARGV[9], 'PX', total)
  return {1}
end
t.lease, t.expiry, t.retention = t.age + lease, t.age + retention, retention
local total = math.max(t.lease, t.expiry) + grace
local identity = again and string.sub(value, 81, 172) or ARGV[10]
redis.call('SET', KEYS[1], times(t, total) .. identity .. string.sub(value, 173), 'PX', total - t.age)
return {again and 2 or 3, value}
