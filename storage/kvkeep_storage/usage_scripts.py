"""The Lua that charges a tenant for its caches, shared by every script that changes records.

A cache is charged once, however many contexts share it: with what is stored of it, or, when that
is more, with what the largest build that a context waits for will store. The charge is always
worked out from the records, never added up, so repeating a change charges nothing twice.
"""

from typing import Final

# The field of the charges that holds their sum; no cache can have this name.
TOTAL: Final = ":total"

# ``waiting`` is a sorted set of one cache: the contexts that wait for it, by estimated bytes.
ACCOUNT: Final = """
local unfinished_status = {queued = true, building = true, rebuilding = true}
local function whole(number) return string.format('%.0f', number) end
-- Not merely at a higher ratio: an answer must not depend on what others asked for.
local function holds(ratios, asked)
  for ratio in string.gmatch(ratios, '[^,]+') do
    if tonumber(ratio) == tonumber(asked) then return true end
  end
  return false
end
-- A damaged number counts as 0: an error here would leave a change half done.
local function number(text) return tonumber(text) or 0 end
local function estimate(full_bytes, ratio)
  return math.ceil(number(full_bytes) * number(ratio))
end
local function recharge(charges, cache, waiting, cache_id)
  local charge = number(redis.call('HGET', cache, 'stored_bytes'))
  local largest = redis.call('ZRANGE', waiting, 0, 0, 'REV', 'WITHSCORES')
  if largest[2] then charge = math.max(charge, tonumber(largest[2])) end
  local before = number(redis.call('HGET', charges, cache_id))
  if charge == 0 then
    redis.call('HDEL', charges, cache_id)
  else
    redis.call('HSET', charges, cache_id, whole(charge))
  end
  if charge == before then return end
  local total = redis.call('HINCRBY', charges, ':total', whole(charge - before))
  if total == 0 then redis.call('HDEL', charges, ':total') end
end
local function wait(context, unfinished, waiting, id)
  local size = redis.call('HMGET', context, 'full_bytes', 'ratio')
  redis.call('SADD', unfinished, id)
  redis.call('ZADD', waiting, whole(estimate(size[1], size[2])), id)
end
local function stop_waiting(unfinished, waiting, id)
  redis.call('SREM', unfinished, id)
  redis.call('ZREM', waiting, id)
end
"""

# A limit is '' when there is none. A build that is not needed, because the cache is committed at
# this ratio, is asked nothing for; and bytes that are charged already are not asked for again.
QUOTAS: Final = (
    ACCOUNT
    + """
local function over(quota, limit, used, asked)
  if limit == '' or asked == 0 or used + asked <= tonumber(limit) then return nil end
  return {'quota', quota, limit, whole(used), whole(asked)}
end
local function over_build(unfinished, cache, charges, cache_id, bytes, ratio, max_queued, max_bytes)
  local ratios = redis.call('HGET', cache, 'ratios')
  if ratios and holds(ratios, ratio) then return nil end
  local charged = redis.call('HMGET', charges, cache_id, ':total')
  local asked = math.max(0, bytes - number(charged[1]))
  return over('queued', max_queued, redis.call('SCARD', unfinished), 1)
    or over('bytes', max_bytes, number(charged[2]), asked)
end
"""
)

# KEYS context unfinished waiting    ARGV id    -> 1, or 0 when there is no such context
RECOUNT_CONTEXT: Final = (
    ACCOUNT
    + """
local context = redis.call('HMGET', KEYS[1], 'status', 'refresh_requested_at')
if unfinished_status[context[1]] then
  wait(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
else
  redis.call('ZREM', KEYS[3], ARGV[1])
  if not context[2] then redis.call('SREM', KEYS[2], ARGV[1]) end
end
return context[1] and 1 or 0
"""
)

# KEYS cache waiting charges    ARGV cache_id
RECHARGE: Final = (
    ACCOUNT
    + """
recharge(KEYS[3], KEYS[1], KEYS[2], ARGV[1])
return 1
"""
)

# KEYS charges    -> the sum of all charges, which is also written down
SUM: Final = (
    ACCOUNT
    + """
redis.call('HDEL', KEYS[1], ':total')
local total = 0
for _, charge in ipairs(redis.call('HVALS', KEYS[1])) do total = total + number(charge) end
if total > 0 then redis.call('HSET', KEYS[1], ':total', whole(total)) end
return whole(total)
"""
)
