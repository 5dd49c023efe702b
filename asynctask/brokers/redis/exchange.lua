-- Acknowledges copies, then moves the next ones from their queues into the process's own list.
-- KEYS: 1 asynctask:fetched:ID, 2 asynctask:held, 3 asynctask:holders, 4 paused, 5 asynctask:deaths, 6... the queues' lists,
--       then the counters
-- ARGV: 1 process, 2 limit, 3 batch, 4 now in seconds, 5 number of queues, their names, number of counters, increment and
--       expiry in seconds (0: none) of each, number of untracked copies to acknowledge, their fields, then field and
--       jid:attempt of each tracked one
-- Returns {number from each queue, payloads, {jid, deaths, ...}}
local fetched, held, holders = KEYS[1], KEYS[2], KEYS[3]
local process, limit, batch, now, queues = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

-- Fails on a key of another type before anything is taken from a queue.
local left = redis.call('HLEN', fetched)
redis.call('HLEN', held)
redis.call('SCARD', holders)
local counted = redis.call('HLEN', KEYS[5]) > 0

local counted_at = 6 + queues
local counters = tonumber(ARGV[counted_at])
local at = counted_at + 2 * counters + 1
local untracked = tonumber(ARGV[at])
for first = at + 1, at + untracked, 4000 do
  left = left - redis.call('HDEL', fetched, unpack(ARGV, first, math.min(first + 3999, at + untracked)))
end
for i = at + untracked + 1, #ARGV, 2 do
  if redis.call('HDEL', fetched, ARGV[i]) == 1 then
    left = left - 1
    redis.call('HDEL', held, ARGV[i + 1])
  end
end

local counts, texts, deaths = {}, {}, {}

local function keep(queue, popped)
  for first = 1, #popped, 2000 do
    local pairs_, places = {}, {}
    for i = first, math.min(first + 1999, #popped) do
      local text, field = popped[i], batch .. ':' .. (#texts + i) .. ':' .. queue
      pairs_[#pairs_ + 1], pairs_[#pairs_ + 2] = field, text
      -- The place of a tracked copy; it has this last member, see envelope.py.
      if string.find(text, '"asynctask":{"jid":"', -500, true) then
        local jid, attempt = string.match(text, '"asynctask":{"jid":"([^"]+)","attempt":(%d+)[^{}]*}}$', -500)
        if jid then
          places[#places + 1], places[#places + 2] = jid .. ':' .. attempt, 'p' .. process .. '\n' .. field
        end
      end
      if counted then
        for jid in string.gmatch(text, '"jid":%s*"([^"]+)"') do
          local count, until_ = string.match(redis.call('HGET', KEYS[5], jid) or '', '^(%d+) (%d+)$')
          if count and tonumber(until_) > now then
            deaths[#deaths + 1], deaths[#deaths + 2] = jid, count
          end
        end
      end
    end
    redis.call('HSET', fetched, unpack(pairs_))
    if #places > 0 then
      redis.call('HSET', held, unpack(places))
    end
  end
end

if limit > 0 and queues > 0 then
  local paused = redis.call('SMISMEMBER', KEYS[4], unpack(ARGV, 6, 5 + queues))
  for i = 1, queues do
    counts[i] = 0
    if paused[i] == 0 and #texts < limit then
      local popped = redis.call('RPOP', KEYS[5 + i], limit - #texts)
      if popped then
        keep(ARGV[5 + i], popped)
        for j = 1, #popped do
          texts[#texts + 1] = popped[j]
        end
        counts[i] = #popped
      end
    end
  end
end

if #texts > 0 then
  redis.call('SADD', holders, process)
elseif left == 0 and #ARGV > at then
  redis.call('SREM', holders, process)
end

-- Last: an error above must not count, and a full server still counts what it wrote before.
for i = 1, counters do
  redis.pcall('INCRBY', KEYS[5 + queues + i], ARGV[counted_at + 2 * i - 1]) -- a key of another type must not stop the work
  if ARGV[counted_at + 2 * i] ~= '0' then
    redis.call('EXPIRE', KEYS[5 + queues + i], ARGV[counted_at + 2 * i])
  end
end
return {counts, texts, deaths}
