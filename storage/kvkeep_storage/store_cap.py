"""Keeping the caches of all tenants under one size: the least recently used of them go.

Their contexts stay, and stay ready; each is built again at its next question. The cache used last
always stays: under a cap that is too small even for it, it would be built again for ever, and
never answer. Documents are not counted, because nothing could be built without them, and neither
is what the sweeper removes anyway once its grace period is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvkeep_storage.binding import require_bound
from kvkeep_storage.generations import release_generation
from kvkeep_storage.inventory import Stored
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects


@dataclass(frozen=True, slots=True)
class Evicted:
    """How many caches went by this call, and the bytes they had."""

    caches: int
    size_bytes: int


async def evict_to_cap(
    objects: Objects,
    metadata: Metadata,
    leases: Leases,
    stored: Mapping[GenerationKey, Stored],
    cap_bytes: int,
) -> Evicted:
    """Remove committed caches until the rest is within the cap, or nothing more may go.

    ``stored`` is what lies in the store. A cache that is read, built or waited for is spared.
    Safe in many processes at once: what another one has evicted counts, and is not made up for.
    Raises: StoreMismatch, before anything else goes; ObjectsUnavailable, MetadataUnavailable.
    """
    over_bytes, candidates = await _over(metadata, stored, cap_bytes)
    evicted = Evicted(0, 0)
    for key in candidates:
        if over_bytes <= 0:
            break
        await require_bound(objects, metadata)
        outcome = await metadata.evict(key.tenant, key.cache_id, key.generation)
        if outcome == "busy":
            continue
        size_bytes = stored[key].size_bytes
        over_bytes -= size_bytes
        if outcome == "evicted":
            # A reader that came in between finds objects missing and looks at the record again.
            await release_generation(objects, metadata, leases, key)
            evicted = Evicted(evicted.caches + 1, evicted.size_bytes + size_bytes)
    return evicted


async def over_cap(
    metadata: Metadata, stored: Mapping[GenerationKey, Stored], cap_bytes: int
) -> Evicted:
    """What ``evict_to_cap`` would remove if nobody needed it now. Modifies nothing."""
    over_bytes, candidates = await _over(metadata, stored, cap_bytes)
    going = Evicted(0, 0)
    for key in candidates:
        if going.size_bytes >= over_bytes:
            break
        going = Evicted(going.caches + 1, going.size_bytes + stored[key].size_bytes)
    return going


async def _over(
    metadata: Metadata, stored: Mapping[GenerationKey, Stored], cap_bytes: int
) -> tuple[int, list[GenerationKey]]:
    """By how many bytes committed caches are over the cap, and which may go, in that order."""
    used_at = await metadata.live_caches(sorted({key.tenant for key in stored}))
    oldest_first = sorted(used_at, key=lambda key: used_at[key])
    over_bytes = sum(stored[key].size_bytes for key in used_at if key in stored) - cap_bytes
    return over_bytes, [key for key in oldest_first[:-1] if key in stored]
