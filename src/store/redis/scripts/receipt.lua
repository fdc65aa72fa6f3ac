-- What a call has removed already, if it is one whose reply was lost.
local function told_before(receipt, call)
  local kept = redis.call('GET', receipt)
  if kept and string.sub(kept, 1, #call) == call then return tonumber(string.sub(kept, #call + 2)) end
end

local function leave_receipt(receipt, call, told)
  redis.call('SET', receipt, call .. ' ' .. told, 'PX', 60000)
end

