#!lua flags=allow-oom
-- What every script knows of a record; frame.rs has the layout and the reasons.
local LOST, APPLIED, UNREADABLE = 0, 1, -1
local STARTED, COMPLETED, RELEASED = 1, 2, 3
local TIMES = '<BBI6I6I6I6I6I4I4'

-- The times of a record, or nothing if they cannot be relied on. `left` is what the server says of the
-- key's time to live, and the only clock that is read: age = total - left.
local function read(value, left)
  local times = string.sub(value, 1, 40)
  if #value < 172 or left < 0 or times ~= string.sub(value, 41, 80) then return end
  local version, state, total, lease, expiry, retention, done, outcome, notes =
    struct.unpack(TIMES, times)
  if version ~= 1 then return end
  return {
    state = state, age = total - left, lease = lease, expiry = expiry,
    retention = retention, done = done, outcome = outcome, notes = notes,
  }
end

local function times(t, total)
  local packed = struct.pack(
    TIMES, 1, t.state, total, t.lease, t.expiry, t.retention, t.done, t.outcome, t.notes)
  return packed .. packed
end

local function owner(value) return string.sub(value, 89, 104) end

-- Whether the record is the abandoned one that a resolution saw: creation, then lease. None seen: yes.
local function is_seen(t, value, created, lease)
  return created == ''
    or (created == string.sub(value, 81, 88) and tonumber(lease) == t.lease and t.lease <= t.age)
end
