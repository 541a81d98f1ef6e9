"""Reading a few fields of very many records: their whole text would cost more than the look."""

from collections.abc import Sequence
from typing import Final

from kvkeep_storage.redis_link import RedisLink, texts

# About a millisecond of the server's time.
_KEYS_AT_ONCE: Final = 500

# KEYS hash ...    ARGV field ...    -> value, ... of each hash in turn; '' for a missing one
_FIELDS: Final = """
local reply = {}
for _, key in ipairs(KEYS) do
  for _, value in ipairs(redis.call('HMGET', key, unpack(ARGV))) do
    reply[#reply + 1] = value or ''
  end
end
return reply
"""


async def hash_fields(link: RedisLink, keys: Sequence[str], *fields: str) -> list[list[str]]:
    """The fields of each hash, all of one tenant; "" where a field or a hash is missing.

    Not one snapshot of all. Raises: MetadataUnavailable.
    """
    found = []
    for first in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[first : first + _KEYS_AT_ONCE]
        values = texts(await link.run(_FIELDS, some, fields))
        found += [values[at : at + len(fields)] for at in range(0, len(values), len(fields))]
    return found
