"""The Lua scripts that change context and cache records.

Each names its KEYS and ARGV. Every key it touches is in KEYS, all of one tenant. A script over
the contexts of a cache is given their ids by the caller and answers ``retry`` when they are no
longer exactly the cache's references. A number handed to a command keeps all its digits; one
joined to a text would not.
"""

from typing import Final

# Answers the list of ids when ARGV[first..] are exactly the members of the reference set.
_REFERENCES: Final = """
local function referencing(key, first, count)
  local ids = {}
  if redis.call('SCARD', key) ~= count then return nil end
  for i = 0, count - 1 do
    local id = ARGV[first + i]
    if redis.call('SISMEMBER', key, id) == 0 then return nil end
    ids[i + 1] = id
  end
  return ids
end
"""

# Whether a cache can be read at exactly the ratio asked, and the copy of what it then offers into
# the context. Not merely at a higher one: an answer must not depend on what others asked for.
_OFFER: Final = """
local function holds(ratios, asked)
  for ratio in string.gmatch(ratios, '[^,]+') do
    if tonumber(ratio) == tonumber(asked) then return true end
  end
  return false
end
local function offer(context, cache)
  local found = redis.call('HMGET', cache, 'ratios', 'ratio_achieved', 'stored_bytes',
                           'policy_applied', 'timings')
  local asked = redis.call('HGET', context, 'ratio')
  local available = {}
  for ratio in string.gmatch(found[1], '[^,]+') do
    if tonumber(ratio) < tonumber(asked) then available[#available + 1] = ratio end
  end
  available[#available + 1] = asked
  redis.call('HSET', context, 'ratios_available', table.concat(available, ','),
             'ratio_achieved', found[2], 'stored_bytes', found[3], 'policy_applied', found[4],
             'timings', found[5])
end
local function make_ready(context, unfinished, id, now)
  redis.call('HSET', context, 'status', 'ready', 'fraction', '1.0', 'ready_at', now)
  redis.call('HDEL', context, 'stage', 'error_code', 'error_detail')
  redis.call('SREM', unfinished, id)
end
local waiting = {queued = true, building = true, rebuilding = true}
"""

# KEYS context contexts unfinished expiry references
# ARGV id is_unfinished expires_at|'' field value ...        -> 1, or 0 when the id is taken
CREATE: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('ZADD', KEYS[2], 0, ARGV[1])
if ARGV[2] == '1' then redis.call('SADD', KEYS[3], ARGV[1]) end
if ARGV[3] ~= '' then redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1]) end
redis.call('SADD', KEYS[5], ARGV[1])
return 1
"""

# KEYS context expiry
# ARGV id now keep|never|set anchor seconds sets field value ... field ...
#      (sets: how many pairs to set; the fields after them are removed)
# -> {'missing'} | {'gone', expires_at} | {'ok', field, value, ...}
PATCH: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {'missing'} end
local times = redis.call('HMGET', KEYS[1], 'expires_at', 'created_at', 'last_used_at')
if times[1] and tonumber(times[1]) <= tonumber(ARGV[2]) then return {'gone', times[1]} end
local next = 7
for _ = 1, tonumber(ARGV[6]) do
  redis.call('HSET', KEYS[1], ARGV[next], ARGV[next + 1])
  next = next + 2
end
for i = next, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
if ARGV[3] == 'never' then
  redis.call('HDEL', KEYS[1], 'expires_at', 'expires_anchor', 'expires_seconds')
  redis.call('ZREM', KEYS[2], ARGV[1])
elseif ARGV[3] == 'set' then
  local base = times[2]
  if ARGV[4] == 'last_used_at' and times[3] then base = times[3] end
  local at = tonumber(base) + tonumber(ARGV[5])
  redis.call('HSET', KEYS[1], 'expires_at', at, 'expires_anchor', ARGV[4],
             'expires_seconds', ARGV[5])
  redis.call('ZADD', KEYS[2], at, ARGV[1])
end
local reply = redis.call('HGETALL', KEYS[1])
table.insert(reply, 1, 'ok')
return reply
"""

# KEYS context expiry    ARGV id now    -> 1, or 0 when it is missing or has expired
TOUCH: Final = """
local record = redis.call('HMGET', KEYS[1], 'created_at', 'expires_at', 'expires_anchor',
                          'expires_seconds', 'last_used_at')
if not record[1] then return 0 end
if record[2] and tonumber(record[2]) <= tonumber(ARGV[2]) then return 0 end
local used = ARGV[2]
if record[5] and tonumber(record[5]) > tonumber(used) then used = record[5] end
redis.call('HSET', KEYS[1], 'last_used_at', used)
redis.call('HINCRBY', KEYS[1], 'queries', 1)
if record[3] == 'last_used_at' then
  local at = tonumber(used) + tonumber(record[4])
  redis.call('HSET', KEYS[1], 'expires_at', at)
  redis.call('ZADD', KEYS[2], at, ARGV[1])
end
return 1
"""

# KEYS context    ARGV stage fraction    -> 1, or 0 when no build of it runs
PROGRESS: Final = """
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'building' and status ~= 'rebuilding' then return 0 end
redis.call('HSET', KEYS[1], 'stage', ARGV[1], 'fraction', ARGV[2])
return 1
"""

# KEYS context unfinished
# ARGV id status is_unfinished sources,comma,separated field value ...
# -> 'ok' | 'missing' | the status that forbids it
MOVE: Final = """
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return 'missing' end
if not string.find(',' .. ARGV[4] .. ',', ',' .. status .. ',', 1, true) then return status end
redis.call('HDEL', KEYS[1], 'stage')
redis.call('HSET', KEYS[1], 'status', ARGV[2], unpack(ARGV, 5))
if ARGV[3] == '1' then
  redis.call('SADD', KEYS[2], ARGV[1])
else
  redis.call('SREM', KEYS[2], ARGV[1])
end
return 'ok'
"""

# KEYS context contexts unfinished expiry references cache caches
# ARGV id cache_id
# -> {'retry'} | {'missing'} | {'shared'} | {'last', generation|''}
DELETE: Final = """
local cache_id = redis.call('HGET', KEYS[1], 'cache_id')
if cache_id and cache_id ~= ARGV[2] then return {'retry'} end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('SREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
if not cache_id then return {'missing'} end
redis.call('SREM', KEYS[5], ARGV[1])
if redis.call('SCARD', KEYS[5]) > 0 then return {'shared'} end
local generation = redis.call('HGET', KEYS[6], 'generation') or ''
redis.call('DEL', KEYS[6])
redis.call('SREM', KEYS[7], ARGV[2])
return {'last', generation}
"""

# KEYS cache caches    ARGV cache_id field value ...    -> 1, or 0 when there is one already
RESTORE_CACHE: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""

# KEYS context cache unfinished    ARGV id cache_id now
# -> 1, or 0 when the context does not wait or the cache is not cut at its ratio
ATTACH: Final = (
    _OFFER
    + """
local context = redis.call('HMGET', KEYS[1], 'status', 'cache_id', 'ratio')
local ratios = redis.call('HGET', KEYS[2], 'ratios')
if not context[1] or not ratios then return 0 end
if not waiting[context[1]] or context[2] ~= ARGV[2] then return 0 end
if not holds(ratios, context[3]) then return 0 end
offer(KEYS[1], KEYS[2])
make_ready(KEYS[1], KEYS[3], ARGV[1], ARGV[3])
return 1
"""
)

# KEYS build_lease cache caches references unfinished context ...
# ARGV lease_value cache_id now count id ... field value ...
# -> {'lost'} | {'retry'} | {'unreferenced'} | {'lower'} | {'ok', id made ready, ...}
FLIP: Final = (
    _REFERENCES
    + _OFFER
    + """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'lost'} end
local count = tonumber(ARGV[4])
local ids = referencing(KEYS[4], 5, count)
if not ids then return {'retry'} end
if count == 0 then return {'unreferenced'} end
local old = redis.call('HMGET', KEYS[2], 'ratio', 'generation')
local fields = {}
for i = 5 + count, #ARGV, 2 do fields[ARGV[i]] = ARGV[i + 1] end
if old[1] and old[2] ~= fields.generation and tonumber(old[1]) > tonumber(fields.ratio) then
  return {'lower'}
end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], unpack(ARGV, 5 + count))
redis.call('SADD', KEYS[3], ARGV[2])
local reply = {'ok'}
for i, id in ipairs(ids) do
  local context = redis.call('HMGET', KEYS[5 + i], 'status', 'ratio')
  if context[1] and holds(fields.ratios, context[2]) then
    if waiting[context[1]] then
      make_ready(KEYS[5 + i], KEYS[5], id, ARGV[3])
      reply[#reply + 1] = id
      context[1] = 'ready'
    end
    if context[1] == 'ready' then offer(KEYS[5 + i], KEYS[2]) end
  end
end
return reply
"""
)

# KEYS cache caches references unfinished context ...
# ARGV cache_id generation count id ...
# -> {'other'} | {'retry'} | {'ok', id that must be rebuilt, ...}
QUARANTINE: Final = (
    _REFERENCES
    + """
if redis.call('HGET', KEYS[1], 'generation') ~= ARGV[2] then return {'other'} end
local ids = referencing(KEYS[3], 4, tonumber(ARGV[3]))
if not ids then return {'retry'} end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
local reply = {'ok'}
for i, id in ipairs(ids) do
  if redis.call('HGET', KEYS[4 + i], 'status') == 'ready' then
    redis.call('HSET', KEYS[4 + i], 'status', 'rebuilding', 'fraction', '0.0')
    redis.call('HDEL', KEYS[4 + i], 'stage', 'ratio_achieved', 'ratios_available',
               'stored_bytes')
    redis.call('SADD', KEYS[4], id)
    reply[#reply + 1] = id
  end
end
return reply
"""
)
