-- Moves members of a set to the dead set, each only if it is still there, and keeps the dead set within its limits.
-- KEYS: 1 the set, 2 dead
-- ARGV: 1 now in seconds, 2 score below which dead members are dropped, 3 number of members to keep, then for each: the member,
--       and its text in the dead set
-- Returns the number moved.
local moved = 0
redis.call('ZCARD', KEYS[2])
for i = 4, #ARGV, 2 do
  if redis.call('ZREM', KEYS[1], ARGV[i]) == 1 then
    redis.call('ZADD', KEYS[2], ARGV[1], ARGV[i + 1])
    moved = moved + 1
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -tonumber(ARGV[3]) - 1)
return moved
