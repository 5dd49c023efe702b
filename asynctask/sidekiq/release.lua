-- Moves members of a set to their queues, each only if another process has not moved it.
-- KEYS: 1 the set, 2 queues, 3 dead, 4... the queues' lists
-- ARGV: 1 now in seconds, 2 number of queues, their names, then for each member: number of its queue (0: it is no job, and goes
--       to the dead set), member, payload to push
-- Returns the number moved.
local queues, moved = tonumber(ARGV[2]), 0
redis.call('SCARD', KEYS[2]) -- fails on a key of another type before anything leaves the set
redis.call('ZCARD', KEYS[3])
for i = 1, queues do
  redis.call('LLEN', KEYS[3 + i])
end
for i = 3 + queues, #ARGV, 3 do
  local queue = tonumber(ARGV[i])
  if redis.call('ZREM', KEYS[1], ARGV[i + 1]) == 1 then
    if queue == 0 then
      redis.call('ZADD', KEYS[3], ARGV[1], ARGV[i + 2])
    else
      redis.call('SADD', KEYS[2], ARGV[2 + queue])
      redis.call('LPUSH', KEYS[3 + queue], ARGV[i + 2])
    end
    moved = moved + 1
  end
end
return moved
