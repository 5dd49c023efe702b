-- Acknowledges copies, then moves the next ones from their queues into the process's own list. From a queue in which jobs of
-- others stand, it takes only what this process performs: it passes the others, which stay where they are.
-- KEYS: 1 asynctask:fetched:ID, 2 asynctask:held, 3 asynctask:holders, 4 paused, 5 asynctask:deaths, 6... the queues' lists,
--       then asynctask:passed:QUEUE of each, then the counters
-- ARGV: 1 process, 2 limit, 3 batch, 4 now in seconds, 5 number of queues, their names, number of counters, increment and
--       expiry in seconds (0: none) of each, number of untracked copies to acknowledge, their fields, number of tracked ones,
--       field and jid:attempt of each, then, if others' jobs stand in a queue: the most jobs to pass in each queue, the
--       longest anchor, the names of ActiveJob's two wrappers, for each queue how many were passed (-1: it is not such a
--       queue) and the text of the last of these, its anchor, and the names of the workers whose untracked jobs are taken
-- Returns {number from each queue, payloads, {jid, deaths, ...}, {number passed, number up to the anchor, the anchor, length of
--       the queue, 1 if more is to be looked at} or {} of each queue}
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
local tracked = tonumber(ARGV[at + untracked + 1])
local passing = at + untracked + 2 + 2 * tracked -- where what is needed to pass jobs begins
for i = at + untracked + 2, passing - 1, 2 do
  if redis.call('HDEL', fetched, ARGV[i]) == 1 then
    left = left - 1
    redis.call('HDEL', held, ARGV[i + 1])
  end
end

local counts, texts, deaths, passed = {}, {}, {}, {}

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
  for i = 1, #popped do
    texts[#texts + 1] = popped[i]
  end
end

local known
local function is_given(value) -- as in Ruby
  return value ~= nil and value ~= cjson.null and value ~= false
end

-- Whether a job is left to others, as the fetcher decides it. It reads what this script cannot.
local function is_left(text)
  if string.find(text, '"asynctask":{"jid":"[^"]+","attempt":[1-9]%d*[^{}]*}}$', -500) then
    return false
  end
  local is_json, job = pcall(cjson.decode, text)
  if not is_json or type(job) ~= 'table' or type(job.class) ~= 'string' or type(job.args) ~= 'table' then
    return false
  end
  if is_given(job.bid) or is_given(job.encrypt) then
    return true
  end
  if job.use_task_event == true then
    return false
  end
  local name = job.class
  if name == ARGV[passing + 2] or name == ARGV[passing + 3] then
    local data = job.args[1]
    local carried = job.wrapped
    if type(carried) ~= 'string' then
      carried = type(data) == 'table' and data.job_class
    end
    name = type(carried) == 'string' and carried or name
  end
  return not known[name]
end

-- Takes jobs of a queue in which others' stand. The first n are theirs and were passed before; the last of these, the anchor,
-- is looked for again, because others take from the head.
local function pass(i, wanted)
  if not known then
    known = {}
    for j = passing + 4 + 2 * queues, #ARGV do
      known[ARGV[j]] = true
    end
  end
  local key, most, longest = KEYS[5 + i], tonumber(ARGV[passing]), tonumber(ARGV[passing + 1])
  local n, anchor = tonumber(ARGV[passing + 2 + 2 * i]), ARGV[passing + 3 + 2 * i]
  local length, popped, count = redis.call('LLEN', key), {}, KEYS[5 + queues + i]
  local before = tonumber(redis.pcall('GET', count)) or 0
  redis.call('DEL', count) -- a full server refuses writes that add something, unless the script has written before
  if n > 0 and redis.call('LINDEX', key, -n) ~= anchor then
    local first = math.min(n, length)
    local near = redis.call('LRANGE', key, -first, -math.max(1, first - 200)) -- a few were taken: quicker than LPOS
    local at = #near
    while at > 0 and near[at] ~= anchor do
      at = at - 1
    end
    local place = at == 0 and redis.call('LPOS', key, anchor, 'RANK', -1, 'MAXLEN', n + 1000)
    n = at > 0 and first - at + 1 or place and length - place or 0
  end
  while n > 0 and #popped < wanted do -- what was put back lies before those
    local head = redis.call('LINDEX', key, -1)
    if is_left(head) then
      break
    end
    popped[#popped + 1] = redis.call('RPOP', key)
    n, length = n - 1, length - 1
  end
  local anchored, looked, gone = n, 0, 'taken ' .. batch
  local part
  repeat
    part = redis.call('LRANGE', key, -(n + 100), -(n + 1))
    local place, taken = n, 0
    for j = #part, 1, -1 do
      if #popped >= wanted or looked >= most then
        break
      end
      place, looked = place + 1, looked + 1
      if is_left(part[j]) then
        n = n + 1
        -- No other job has the same text; behind many without a jid it is one of those: there it may be the wrong one.
        if #part[j] <= longest and (string.find(part[j], '"jid":', 1, true) or n - anchored >= 500) then
          anchor, anchored = part[j], n
        end
      else
        popped[#popped + 1] = part[j]
        redis.call('LSET', key, -place, gone)
        taken = taken + 1
      end
    end
    if taken > 0 then -- from the nearer end
      redis.call('LREM', key, 2 * n < length and -taken or taken, gone)
      length = length - taken
    end
  until #part < 100 or #popped >= wanted or looked >= most
  if n > 0 then -- until it has looked at all of them again, they are as many as before
    redis.call('SET', count, looked >= most and math.max(n, before) or n, 'EX', 15)
  end
  passed[i] = {n, anchored, anchor, length, looked >= most and 1 or 0}
  return popped
end

if limit > 0 and queues > 0 then
  local paused = redis.call('SMISMEMBER', KEYS[4], unpack(ARGV, 6, 5 + queues))
  for i = 1, queues do
    counts[i], passed[i] = 0, {}
    if paused[i] == 0 and #texts < limit then
      local passes = ARGV[passing] and ARGV[passing + 2 + 2 * i] ~= '-1'
      local popped = passes and pass(i, limit - #texts) or redis.call('RPOP', KEYS[5 + i], limit - #texts)
      if popped then
        keep(ARGV[5 + i], popped)
        counts[i] = #popped
      end
    end
  end
end

if #texts > 0 then
  redis.call('SADD', holders, process)
elseif left == 0 and untracked + tracked > 0 then
  redis.call('SREM', holders, process)
end

-- Last: an error above must not count, and a full server still counts what it wrote before.
for i = 1, counters do
  redis.pcall('INCRBY', KEYS[5 + 2 * queues + i], ARGV[counted_at + 2 * i - 1]) -- a key of another type must not stop the work
  if ARGV[counted_at + 2 * i] ~= '0' then
    redis.call('EXPIRE', KEYS[5 + 2 * queues + i], ARGV[counted_at + 2 * i])
  end
end
return {counts, texts, deaths, passed}
