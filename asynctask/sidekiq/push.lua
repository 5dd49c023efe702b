-- Appends copies to their queues; skips tracked ones that are held already.
-- KEYS: 1 queues, 2 asynctask:queues, 3 asynctask:held, 4... the list of each queue
-- ARGV: 1 number of queues, their names, then for each copy: number of its queue, jid:attempt (empty: untracked), payload
-- Returns the number pushed.
local n = tonumber(ARGV[1])
for i = 1, n do -- fails on a key of another type before anything is written
  redis.call('LLEN', KEYS[3 + i])
end
redis.call('SCARD', KEYS[1])
redis.call('SCARD', KEYS[2])
redis.call('HLEN', KEYS[3])
local pushed, seen = 0, {}
for i = n + 2, #ARGV, 3 do
  local queue, key = tonumber(ARGV[i]), ARGV[i + 1]
  if key == '' or redis.call('HSETNX', KEYS[3], key, 'q' .. ARGV[1 + queue]) == 1 then
    if not seen[queue] then
      seen[queue] = true
      redis.call('SADD', KEYS[1], ARGV[1 + queue])
    end
    if key ~= '' and seen[queue] ~= 'ours' then
      seen[queue] = 'ours'
      redis.call('SADD', KEYS[2], ARGV[1 + queue])
    end
    redis.call('LPUSH', KEYS[3 + queue], ARGV[i + 2])
    pushed = pushed + 1
  end
end
return pushed
