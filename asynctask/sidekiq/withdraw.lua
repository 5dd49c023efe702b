-- Removes the waiting copies of one Task from a part of a queue.
-- KEYS: 1 the queue's list, 2 asynctask:held
-- ARGV: 1 position of the first, 2 number to look at, 3 task id, 4 the most to remove, 5 a text that no payload equals
-- Returns {number looked at, jid:attempt, ...}
local first, limit, gone = tonumber(ARGV[1]), tonumber(ARGV[4]), ARGV[5]
redis.call('HLEN', KEYS[2])
local texts = redis.call('LRANGE', KEYS[1], first, first + tonumber(ARGV[2]) - 1)
local found = {#texts}
local mark = '"task_id":' .. ARGV[3]
local pattern = '"asynctask":{"jid":"([^"]+)","attempt":([1-9]%d*),' .. mark
for i = 1, #texts do
  if #found <= limit and string.find(texts[i], mark, -500, true) then
    local jid, attempt = string.match(texts[i], pattern .. '}}$', -500)
    if not jid then
      jid, attempt = string.match(texts[i], pattern .. ',[^{}]*}}$', -500)
    end
    if jid then
      redis.call('LSET', KEYS[1], first + i - 1, gone)
      redis.call('HDEL', KEYS[2], jid .. ':' .. attempt)
      found[#found + 1] = jid .. ':' .. attempt
    end
  end
end
if #found > 1 then
  redis.call('LREM', KEYS[1], #found - 1, gone)
end
return found
