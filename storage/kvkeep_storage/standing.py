"""What the records say now of caches that somebody holds copies of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.redis_link import texts

# Asked for in one script, which keeps Redis from everything else meanwhile.
_AT_ONCE: Final = 200

# KEYS cache references ...    -> {generation or '', number of references, ...}
_STANDING: Final = """
local reply = {}
for i = 1, #KEYS, 2 do
  reply[i] = redis.call('HGET', KEYS[i], 'generation') or ''
  reply[i + 1] = redis.call('SCARD', KEYS[i + 1])
end
return reply
"""


@dataclass(frozen=True, slots=True)
class Standing:
    """``generation`` is the committed one, if any; ``is_referenced``: whether a context has it."""

    generation: str | None
    is_referenced: bool


async def standings(
    metadata: Metadata, tenant: str, cache_ids: Iterable[str]
) -> Mapping[str, Standing]:
    """What the records say of each cache. They change meanwhile; each is seen at one moment.

    Raises: MetadataUnavailable.
    """
    keys = TenantKeys(tenant)
    ids = sorted(set(cache_ids))
    found: dict[str, Standing] = {}
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        asked = [key for item in some for key in (keys.cache(item), keys.references(item))]
        reply = texts(await metadata.link.run(_STANDING, asked))
        for cache_id, generation, references in zip(some, reply[::2], reply[1::2], strict=True):
            found[cache_id] = Standing(generation or None, references != "0")
    return found
