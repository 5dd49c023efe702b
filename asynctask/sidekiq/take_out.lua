-- Deletes one job from a queue, the oldest of equal ones.
-- KEYS: 1 the queue's list, 2 asynctask:held
-- ARGV: 1 its text, 2 jid:attempt (empty: untracked)
-- Returns the number deleted: 1 or 0.
redis.call('HLEN', KEYS[2])
local taken = redis.call('LREM', KEYS[1], -1, ARGV[1])
if taken == 1 and ARGV[2] ~= '' then
  redis.call('HDEL', KEYS[2], ARGV[2])
end
return taken
