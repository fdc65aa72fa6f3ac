-- KEYS: record. ARGV: owner, the head of the note (its kind and name), the whole note.
local value = redis.call('GET', KEYS[1])
if not value then return LOST end
local left = redis.call('PTTL', KEYS[1])
local t = read(value, left)
if not t then return UNREADABLE end
if t.state ~= STARTED or owner(value) ~= ARGV[1] then return LOST end
local stop = #value + 1
local at, after = stop - t.notes, nil
if at < 173 then return UNREADABLE end
while at < stop do
  if at + 8 > #value then return UNREADABLE end
  local data = at + 5 + struct.unpack('<I4', value, at + 1)
  if data + 3 > #value then return UNREADABLE end
  local following = data + 4 + struct.unpack('<I4', value, data) + 8
  if following > stop then return UNREADABLE end
  if string.sub(value, at, data - 1) == ARGV[2] then
    after = following
    break
  end
  at = following
end
after = after or at
t.notes = t.notes - (after - at) + #ARGV[3]
redis.call('SET', KEYS[1], times(t, t.age + left) .. string.sub(value, 81, at - 1) .. ARGV[3]
  .. string.sub(value, after), 'KEEPTTL')
return APPLIED
