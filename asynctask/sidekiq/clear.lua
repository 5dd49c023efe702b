-- Deletes the next jobs of a queue; removes an empty queue from the set of queues.
-- KEYS: 1 the queue's list, 2 asynctask:held, 3 queues
-- ARGV: 1 the most to delete, 2 the queue's name
-- Returns {number deleted, jid:attempt of each tracked one, ...}
redis.call('HLEN', KEYS[2])
redis.call('SCARD', KEYS[3])
local texts = redis.call('RPOP', KEYS[1], ARGV[1]) or {}
local found = {#texts}
for i = 1, #texts do
  -- A tracked job has this last member, see envelope.py.
  if string.find(texts[i], '"asynctask":{"jid":"', -500, true) then
    local jid, attempt = string.match(texts[i], '"asynctask":{"jid":"([^"]+)","attempt":(%d+)[^{}]*}}$', -500)
    if jid then
      redis.call('HDEL', KEYS[2], jid .. ':' .. attempt)
      found[#found + 1] = jid .. ':' .. attempt
    end
  end
end
if redis.call('LLEN', KEYS[1]) == 0 then
  redis.call('SREM', KEYS[3], ARGV[2])
end
return found
