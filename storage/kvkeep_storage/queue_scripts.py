"""The Lua scripts of the build queue. KEYS[1] is the stream, ARGV[1] the consumer group."""

from typing import Final

# The group may be missing: a new server, or one that was flushed.
_GROUP: Final = """
redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
"""

# Ends the script with 0 unless ARGV[2] owns entry ARGV[3].
_OWNED: Final = (
    _GROUP
    + """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
if #pending == 0 or pending[1][2] ~= ARGV[2] then return 0 end
"""
)

# ARGV group tenant context    -> the entry's id
ENQUEUE: Final = (
    _GROUP
    + """
return redis.call('XADD', KEYS[1], '*', 'tenant', ARGV[2], 'context', ARGV[3])
"""
)

# ARGV group owner ttl_ms held ...    -> {id, attempts, field, value, ...} or {last id}
# Held are the ids that the owner knows it has. Any other that is its own was handed out in a reply
# that never arrived: that was no attempt, and nobody else will take it before its time is over.
CLAIM: Final = (
    _GROUP
    + """
local function claim(entry, ...)
  local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry[1], ...)
  if not claimed[1] then redis.call('XACK', KEYS[1], ARGV[1], entry[1]) end
  return claimed[1]
end
local function found(id, attempts, fields)
  local reply = {id, attempts}
  for _, text in ipairs(fields) do reply[#reply + 1] = text end
  return reply
end
local held = {}
for i = 4, #ARGV do held[ARGV[i]] = true end
for _, own in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 100, ARGV[2])) do
  if not held[own[1]] then
    local entry = claim(own, 'RETRYCOUNT', own[4])
    if entry then return found(entry[1], own[4], entry[2]) end
  end
end
while true do
  local idle = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', 1)
  if #idle == 0 then break end
  local entry = claim(idle[1])
  if entry then return found(entry[1], idle[1][4] + 1, entry[2]) end
end
local new = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1,
                       'STREAMS', KEYS[1], '>')
if new then
  local entry = new[1][2][1]
  return found(entry[1], 1, entry[2])
end
local stream = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #stream, 2 do
  if stream[i] == 'last-generated-id' then return {stream[i + 1]} end
end
"""
)

# ARGV group owner id    -> 1, or 0 when it is not this owner's
# JUSTID: the time of the last delivery moves, the number of deliveries does not.
HEARTBEAT: Final = (
    _OWNED
    + """
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
return 1
"""
)

# ARGV group owner id    -> 1, or 0 when it is not this owner's
ACK: Final = (
    _OWNED
    + """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
return 1
"""
)

# ARGV group owner id nobody idle_ms attempts    -> 1, or 0 when it is not this owner's
RELEASE: Final = (
    _OWNED
    + """
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[4], 0, ARGV[3], 'IDLE', ARGV[5],
           'RETRYCOUNT', ARGV[6], 'JUSTID')
return 1
"""
)

# ARGV group nobody ttl_ms    -> how many entries had an owner or waited for one
# Consumers go as well: none of them is alive, and nothing is theirs any more.
VOID: Final = (
    _GROUP
    + """
local start, voided = '-', 0
while true do
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], start, '+', 100)
  if #pending == 0 then break end
  for _, entry in ipairs(pending) do
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry[1], 'IDLE', ARGV[3],
               'RETRYCOUNT', entry[4], 'JUSTID')
    voided = voided + 1
    start = '(' .. entry[1]
  end
end
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  if consumer.name ~= ARGV[2] then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
  end
end
return voided
"""
)

# ARGV group forget_ms    -> how many consumers there are left
# Forgets consumers without entries that were not heard of for forget_ms.
FORGET: Final = (
    _GROUP
    + """
local left = 0
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  if consumer.pending == 0 and consumer.idle > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
  else
    left = left + 1
  end
end
return left
"""
)

# Answers the names of all consumers but ``nobody`` that were heard of within ttl_ms.
_BUILDERS: Final = (
    _GROUP
    + """
local function builders(nobody, ttl_ms)
  local names = {}
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local consumer = {}
    for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
    if consumer.name ~= nobody and consumer.idle <= tonumber(ttl_ms) then
      names[#names + 1] = consumer.name
    end
  end
  return names
end
"""
)

# ARGV group nobody ttl_ms    -> how many builders there are
BUILDERS: Final = _BUILDERS + "return #builders(ARGV[2], ARGV[3])"

# KEYS stream refusals    ARGV group nobody ttl_ms owner keep_seconds
# -> for how many seconds every builder has refused, -1 while one has not
REFUSE: Final = (
    _BUILDERS
    + """
redis.call('HSET', KEYS[2], 'by:' .. ARGV[4], '1')
redis.call('EXPIRE', KEYS[2], ARGV[5])
for _, name in ipairs(builders(ARGV[2], ARGV[3])) do
  if redis.call('HEXISTS', KEYS[2], 'by:' .. name) == 0 then
    redis.call('HDEL', KEYS[2], 'since')
    return -1
  end
end
local now = redis.call('TIME')[1]
redis.call('HSETNX', KEYS[2], 'since', now)
return tonumber(now) - tonumber(redis.call('HGET', KEYS[2], 'since'))
"""
)

# ARGV group start count    -> {where the next page starts|'', tenant, context, ...}
# In pages, because a long queue in one reply would keep everybody else waiting.
QUEUED: Final = (
    _GROUP
    + """
local entries = redis.call('XRANGE', KEYS[1], ARGV[2], '+', 'COUNT', ARGV[3])
local reply = {''}
if #entries == tonumber(ARGV[3]) then reply[1] = '(' .. entries[#entries][1] end
for _, entry in ipairs(entries) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  if fields.tenant and fields.context then
    reply[#reply + 1] = fields.tenant
    reply[#reply + 1] = fields.context
  end
end
return reply
"""
)
