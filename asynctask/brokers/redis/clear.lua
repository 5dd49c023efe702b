-- Takes the next jobs out of a queue for good; an empty queue is forgotten.
-- KEYS: 1 the queue's list, 2 asynctask:held, 3 queues
-- ARGV: 1 how many at most, 2 the queue's name
-- Returns {how many, jid:attempt of each tracked one, ...}
redis.call('HLEN', KEYS[2])
redis.call('SCARD', KEYS[3])
local texts = redis.call('RPOP', KEYS[1], ARGV[1]) or {}
local found = {#texts}
for i = 1, #texts do
  -- Told by its last member, see envelope.py.
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
