-- Returns unfinished copies to the heads of their queues, unchanged.
-- KEYS: 1 asynctask:fetched:ID, 2 asynctask:held, 3 asynctask:holders, 4 queues, 5 asynctask:deaths, 6... the queues' lists
-- ARGV: 1 process, 2 second until which deaths count, 3 the same from now, 4 number of queues, their names, then for each copy,
--       the next to run last: number of its queue, field, jid:attempt (empty: untracked), jid, deaths, payload to write
--       instead (empty: unchanged)
-- Returns the number put back.
local queues, back = tonumber(ARGV[4]), 0
redis.call('HLEN', KEYS[2]) -- fails on a key of another type before anything leaves the list
redis.call('SCARD', KEYS[3])
redis.call('SCARD', KEYS[4])
redis.call('HLEN', KEYS[5])
for i = 1, queues do
  redis.call('LLEN', KEYS[5 + i])
end
for i = 5 + queues, #ARGV, 6 do
  local queue = tonumber(ARGV[i])
  local text = redis.call('HGET', KEYS[1], ARGV[i + 1])
  if text then
    if ARGV[i + 5] ~= '' then
      text = ARGV[i + 5]
    end
    redis.call('HDEL', KEYS[1], ARGV[i + 1])
    redis.call('SADD', KEYS[4], ARGV[4 + queue])
    redis.call('RPUSH', KEYS[5 + queue], text)
    if ARGV[i + 2] ~= '' then
      redis.call('HSET', KEYS[2], ARGV[i + 2], 'q' .. ARGV[4 + queue])
    end
    if ARGV[i + 4] ~= '0' then
      redis.call('HSET', KEYS[5], ARGV[i + 3], ARGV[i + 4] .. ' ' .. ARGV[2])
      redis.call('EXPIRE', KEYS[5], ARGV[3])
    end
    back = back + 1
  end
end
if redis.call('HLEN', KEYS[1]) == 0 then
  redis.call('SREM', KEYS[3], ARGV[1])
end
return back
