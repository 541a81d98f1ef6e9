"""The Lua scripts that change cache records and what they mean for contexts.

The rules at the top of ``redis_scripts.py`` hold here too. A script over the contexts of a cache
is given their ids by the caller and answers ``retry`` when they are no longer exactly the cache's
references.
"""

from typing import Final

from kvkeep_storage.usage_scripts import ACCOUNT

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

# The copy of what a cache offers into a context that it holds the ratio of.
_OFFER: Final = (
    ACCOUNT
    + """
local function offer(context, cache)
  local found = redis.call('HMGET', cache, 'ratios', 'ratio_achieved', 'stored_bytes',
                           'policy_applied', 'timings', 'fidelity')
  local asked = redis.call('HGET', context, 'ratio')
  local available = {}
  for ratio in string.gmatch(found[1], '[^,]+') do
    if tonumber(ratio) < tonumber(asked) then available[#available + 1] = ratio end
  end
  available[#available + 1] = asked
  redis.call('HSET', context, 'ratios_available', table.concat(available, ','),
             'ratio_achieved', found[2], 'stored_bytes', found[3], 'policy_applied', found[4],
             'timings', found[5])
  if found[6] then
    redis.call('HSET', context, 'fidelity', found[6])
  else
    redis.call('HDEL', context, 'fidelity')
  end
end
local function make_ready(context, unfinished, waiting, id, now)
  redis.call('HSET', context, 'status', 'ready', 'fraction', '1.0', 'ready_at', now)
  redis.call('HDEL', context, 'stage', 'error_code', 'error_detail')
  stop_waiting(unfinished, waiting, id)
end
"""
)

# KEYS cache caches waiting charges
# ARGV cache_id field value ...    -> 1, or 0 when there is one already
RESTORE_CACHE: Final = (
    ACCOUNT
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('SADD', KEYS[2], ARGV[1])
recharge(KEYS[4], KEYS[1], KEYS[3], ARGV[1])
return 1
"""
)

# KEYS context cache unfinished waiting charges    ARGV id cache_id now
# -> 1, or 0 when the context does not wait or the cache is not cut at its ratio
ATTACH: Final = (
    _OFFER
    + """
local context = redis.call('HMGET', KEYS[1], 'status', 'cache_id', 'ratio', 'ratio_from')
local ratios = redis.call('HGET', KEYS[2], 'ratios')
if not context[1] or not ratios then return 0 end
if not unfinished_status[context[1]] or context[2] ~= ARGV[2] then return 0 end
if context[4] or not holds(ratios, context[3]) then return 0 end
offer(KEYS[1], KEYS[2])
make_ready(KEYS[1], KEYS[3], KEYS[4], ARGV[1], ARGV[3])
recharge(KEYS[5], KEYS[2], KEYS[4], ARGV[2])
return 1
"""
)

# KEYS build_lease cache caches references unfinished waiting charges context ...
# ARGV lease_value cache_id now count id ... field value ...
# -> {'lost'} | {'retry'} | {'unreferenced'} | {'lower'} | {'ok', id that waited, ...}
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
  local key = KEYS[7 + i]
  local context = redis.call('HMGET', key, 'status', 'ratio', 'refresh_requested_at',
                             'ratio_from')
  if context[1] and not context[4] and holds(fields.ratios, context[2]) then
    if unfinished_status[context[1]] then
      make_ready(key, KEYS[5], KEYS[6], id, ARGV[3])
      reply[#reply + 1] = id
      context[1] = 'ready'
    elseif context[3] then
      redis.call('HDEL', key, 'refresh_requested_at', 'stage')
      redis.call('HSET', key, 'fraction', '1.0')
      redis.call('SREM', KEYS[5], id)
      reply[#reply + 1] = id
    end
    if context[1] == 'ready' then offer(key, KEYS[2]) end
  end
end
recharge(KEYS[7], KEYS[2], KEYS[6], ARGV[2])
return reply
"""
)

# KEYS cache caches references unfinished waiting charges context ...
# ARGV cache_id generation count id ...
# -> {'other'} | {'retry'} | {'ok', id that must be rebuilt, ...}
QUARANTINE: Final = (
    _REFERENCES
    + ACCOUNT
    + """
if redis.call('HGET', KEYS[1], 'generation') ~= ARGV[2] then return {'other'} end
local ids = referencing(KEYS[3], 4, tonumber(ARGV[3]))
if not ids then return {'retry'} end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
local reply = {'ok'}
for i, id in ipairs(ids) do
  local key = KEYS[6 + i]
  if redis.call('HGET', key, 'status') == 'ready' then
    redis.call('HSET', key, 'status', 'rebuilding', 'fraction', '0.0')
    redis.call('HDEL', key, 'stage', 'ratio_achieved', 'ratios_available', 'stored_bytes',
               'fidelity', 'refresh_requested_at')
    wait(key, KEYS[4], KEYS[5], id)
    reply[#reply + 1] = id
  end
end
recharge(KEYS[6], KEYS[1], KEYS[5], ARGV[1])
return reply
"""
)

# KEYS cache caches waiting charges build_lease readers
# ARGV cache_id generation    -> 'evicted' | 'busy' | 'gone'
EVICT: Final = (
    ACCOUNT
    + """
if redis.call('HGET', KEYS[1], 'generation') ~= ARGV[2] then return 'gone' end
if redis.call('ZCARD', KEYS[3]) > 0 or redis.call('EXISTS', KEYS[5]) == 1 then return 'busy' end
local now_ms = redis.call('TIME')[1] .. '000'
if redis.call('ZCOUNT', KEYS[6], '(' .. now_ms, '+inf') > 0 then return 'busy' end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
recharge(KEYS[4], KEYS[1], KEYS[3], ARGV[1])
return 'evicted'
"""
)
