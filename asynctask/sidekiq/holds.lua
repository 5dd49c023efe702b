-- Where tracked copies are. Forgets copies that a tool deleted.
-- KEYS: 1 asynctask:held
-- ARGV: 1 prefix of every key, 2... jid:attempt
-- Returns for each: '' (not held), 'p' (in the list of a process), or 'q' and the queue that it was pushed to.
local lengths, answers = {}, {}
for i = 2, #ARGV do
  local place = redis.call('HGET', KEYS[1], ARGV[i])
  local there = false
  if place and string.sub(place, 1, 1) == 'p' then
    local process, field = string.match(place, '^p(.-)\n(.*)$')
    there = process and redis.call('HEXISTS', ARGV[1] .. 'asynctask:fetched:' .. process, field) == 1
    answers[i - 1] = 'p'
  elseif place then
    local queue = string.sub(place, 2)
    lengths[queue] = lengths[queue] or redis.call('LLEN', ARGV[1] .. 'queue:' .. queue)
    there = lengths[queue] > 0
    answers[i - 1] = place
  end
  if not there then
    answers[i - 1] = ''
    if place then
      redis.call('HDEL', KEYS[1], ARGV[i])
    end
  end
end
return answers
