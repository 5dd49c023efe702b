-- Puts copies into a set; with a process, moves those that are still in its list in the same step.
-- KEYS: 1 the set, 2 asynctask:fetched:ID, 3 asynctask:held, 4 asynctask:holders
-- ARGV: 1 process (empty: none), 2 score below which members are dropped (empty: none), 3 number of members to keep, then for
--       each copy: score, payload, field, jid:attempt (empty: untracked)
-- Returns the number put into the set.
local process, put = ARGV[1], 0
redis.call('ZCARD', KEYS[1]) -- fails on a key of another type before anything leaves the list
redis.call('HLEN', KEYS[3])
redis.call('SCARD', KEYS[4])
for i = 4, #ARGV, 4 do
  local ours = process == '' or redis.call('HDEL', KEYS[2], ARGV[i + 2]) == 1
  if ours then
    redis.call('ZADD', KEYS[1], ARGV[i], ARGV[i + 1])
    if ARGV[i + 3] ~= '' then
      redis.call('HDEL', KEYS[3], ARGV[i + 3])
    end
    put = put + 1
  end
end
if ARGV[2] ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2])
  redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -tonumber(ARGV[3]) - 1)
end
if process ~= '' and redis.call('HLEN', KEYS[2]) == 0 then
  redis.call('SREM', KEYS[4], process)
end
return put
