"""The Lua scripts that change context records.

Each names its KEYS and ARGV. Every key it touches is in KEYS, all of one tenant. A script that
is given the id of the context's cache answers ``retry`` when it is another one. A number handed
to a command keeps all its digits; one joined to a text would not. What changes who waits for a
cache, or what is stored of it, charges the tenant anew in the same script (``usage_scripts.py``).
"""

from typing import Final

from kvkeep_storage.usage_scripts import ACCOUNT, QUOTAS

# KEYS context contexts unfinished expiry references cache waiting charges
# ARGV id cache_id expires_at|'' max_contexts|'' max_queued|'' max_bytes|'' field value ...
_ADMIT: Final = (
    QUOTAS
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return {'taken'} end
local fields = {}
for i = 7, #ARGV, 2 do fields[ARGV[i]] = ARGV[i + 1] end
local waits = unfinished_status[fields.status]
local refused = over('contexts', ARGV[4], redis.call('ZCARD', KEYS[2]), 1)
if not refused and waits then
  local bytes = estimate(fields.full_bytes, fields.ratio)
  -- A ratio that is still to be found is held by nothing.
  local wanted = fields.ratio_from and '' or fields.ratio
  refused = over_build(KEYS[3], KEYS[6], KEYS[8], ARGV[2], bytes, wanted, ARGV[5], ARGV[6])
end
if refused then return refused end
"""
)

# -> {'ok'} | {'taken'} | {'quota', which, limit, used, asked}
ADMIT: Final = _ADMIT + "return {'ok'}"

# -> as ADMIT
CREATE: Final = (
    _ADMIT
    + """
redis.call('HSET', KEYS[1], unpack(ARGV, 7))
redis.call('ZADD', KEYS[2], 0, ARGV[1])
if waits then wait(KEYS[1], KEYS[3], KEYS[7], ARGV[1]) end
if ARGV[3] ~= '' then redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1]) end
redis.call('SADD', KEYS[5], ARGV[1])
recharge(KEYS[8], KEYS[6], KEYS[7], ARGV[2])
return {'ok'}
"""
)

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
local context = redis.call('HMGET', KEYS[1], 'status', 'refresh_requested_at')
if context[1] ~= 'building' and context[1] ~= 'rebuilding' and not context[2] then return 0 end
redis.call('HSET', KEYS[1], 'stage', ARGV[1], 'fraction', ARGV[2])
return 1
"""

# KEYS context unfinished cache waiting charges
# ARGV id cache_id status sources,comma,separated field value ...
# -> 'ok' | 'retry' | 'missing' | the status that forbids it
# A ready context that was to be built afresh and cannot be keeps what it has.
MOVE: Final = (
    ACCOUNT
    + """
local context = redis.call('HMGET', KEYS[1], 'status', 'cache_id', 'refresh_requested_at')
local status = context[1]
if not status then return 'missing' end
if context[2] ~= ARGV[2] then return 'retry' end
if not string.find(',' .. ARGV[4] .. ',', ',' .. status .. ',', 1, true) then
  if ARGV[3] == 'failed' and context[3] then
    redis.call('HDEL', KEYS[1], 'refresh_requested_at', 'stage')
    redis.call('HSET', KEYS[1], 'fraction', '1.0')
    redis.call('SREM', KEYS[2], ARGV[1])
  end
  return status
end
redis.call('HDEL', KEYS[1], 'stage', 'refresh_requested_at')
redis.call('HSET', KEYS[1], 'status', ARGV[3], unpack(ARGV, 5))
if unfinished_status[ARGV[3]] then
  wait(KEYS[1], KEYS[2], KEYS[4], ARGV[1])
else
  stop_waiting(KEYS[2], KEYS[4], ARGV[1])
end
recharge(KEYS[5], KEYS[3], KEYS[4], ARGV[2])
return 'ok'
"""
)

# KEYS context unfinished cache waiting charges
# ARGV id cache_id now max_queued|'' max_bytes|''
# -> {'ok', field, value, ...} | {'missing'} | {'gone', expires_at} | {'retry'} | {'quota', ...}
# A ready context whose cache is committed goes on answering from it until the next flip.
REBUILD: Final = (
    QUOTAS
    + """
local context = redis.call('HMGET', KEYS[1], 'status', 'cache_id', 'expires_at', 'full_bytes',
                           'ratio', 'refresh_requested_at', 'ratio_from')
local status = context[1]
if not status then return {'missing'} end
if context[2] ~= ARGV[2] then return {'retry'} end
if context[3] and tonumber(context[3]) <= tonumber(ARGV[3]) then return {'gone', context[3]} end
if not unfinished_status[status] and not context[6] then
  local is_committed = redis.call('EXISTS', KEYS[3]) == 1
  local refused
  if status == 'ready' and is_committed then
    refused = over('queued', ARGV[4], redis.call('SCARD', KEYS[2]), 1)
  else
    refused = over_build(KEYS[2], KEYS[3], KEYS[5], ARGV[2], estimate(context[4], context[5]),
                         context[7] and '' or context[5], ARGV[4], ARGV[5])
  end
  if refused then return refused end
  redis.call('HSET', KEYS[1], 'fraction', '0.0')
  redis.call('HDEL', KEYS[1], 'stage', 'error_code', 'error_detail')
  if status == 'ready' and is_committed then
    redis.call('HSET', KEYS[1], 'refresh_requested_at', ARGV[3])
    redis.call('SADD', KEYS[2], ARGV[1])
  else
    local next_status = 'queued'
    if status == 'ready' then next_status = 'rebuilding' end
    redis.call('HSET', KEYS[1], 'status', next_status)
    wait(KEYS[1], KEYS[2], KEYS[4], ARGV[1])
    recharge(KEYS[5], KEYS[3], KEYS[4], ARGV[2])
  end
end
local reply = redis.call('HGETALL', KEYS[1])
table.insert(reply, 1, 'ok')
return reply
"""
)

# KEYS context unfinished cache waiting charges
# ARGV id cache_id ratio    -> 'ok' | 'retry' | 'missing' | 'known'
# The charge of who waits is worked out anew: until now it was that of the highest ratio.
FIND_RATIO: Final = (
    ACCOUNT
    + """
local context = redis.call('HMGET', KEYS[1], 'status', 'cache_id', 'ratio_from')
if not context[1] then return 'missing' end
if context[2] ~= ARGV[2] then return 'retry' end
if not context[3] then return 'known' end
redis.call('HSET', KEYS[1], 'ratio', ARGV[3])
redis.call('HDEL', KEYS[1], 'ratio_from')
if unfinished_status[context[1]] then wait(KEYS[1], KEYS[2], KEYS[4], ARGV[1]) end
recharge(KEYS[5], KEYS[3], KEYS[4], ARGV[2])
return 'ok'
"""
)

# KEYS context contexts unfinished expiry references cache caches waiting charges
# ARGV id cache_id
# -> {'retry'} | {'missing'} | {'shared'} | {'last', generation|''}
DELETE: Final = (
    ACCOUNT
    + """
local cache_id = redis.call('HGET', KEYS[1], 'cache_id')
if cache_id and cache_id ~= ARGV[2] then return {'retry'} end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
stop_waiting(KEYS[3], KEYS[8], ARGV[1])
if not cache_id then return {'missing'} end
redis.call('SREM', KEYS[5], ARGV[1])
local generation = false
if redis.call('SCARD', KEYS[5]) == 0 then
  generation = redis.call('HGET', KEYS[6], 'generation') or ''
  redis.call('DEL', KEYS[6])
  redis.call('SREM', KEYS[7], ARGV[2])
end
recharge(KEYS[9], KEYS[6], KEYS[8], ARGV[2])
if generation then return {'last', generation} end
return {'shared'}
"""
)
