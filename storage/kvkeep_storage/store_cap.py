"""Keeping the caches of all tenants under one size: the least recently used of them go.

Their contexts stay, and stay ready; each is built again at its next question. Documents are not
counted, because nothing could be built without them, and neither is what the sweeper removes
anyway once its grace period is over.
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
    sizes = await _least_recent_first(metadata, stored)
    over_bytes = sum(sizes.values()) - cap_bytes
    evicted = Evicted(0, 0)
    for key, size_bytes in sizes.items():
        if over_bytes <= 0:
            break
        await require_bound(objects, metadata)
        outcome = await metadata.evict(key.tenant, key.cache_id, key.generation)
        if outcome == "busy":
            continue
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
    sizes = await _least_recent_first(metadata, stored)
    over_bytes = sum(sizes.values()) - cap_bytes
    going = Evicted(0, 0)
    for size_bytes in sizes.values():
        if going.size_bytes >= over_bytes:
            break
        going = Evicted(going.caches + 1, going.size_bytes + size_bytes)
    return going


async def _least_recent_first(
    metadata: Metadata, stored: Mapping[GenerationKey, Stored]
) -> dict[GenerationKey, int]:
    """The bytes of every committed generation that lies in the store."""
    used_at = await metadata.live_caches(sorted({key.tenant for key in stored}))
    oldest_first = sorted(used_at, key=lambda key: used_at[key])
    return {key: stored[key].size_bytes for key in oldest_first if key in stored}
