"""What a record says of a generation, and removing one that no record names any more.

Whoever makes a generation that lies there the committed one, or deletes it, holds the build
lease of its cache meanwhile: so nothing is named again while it is being deleted.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvkeep_storage.concurrency import run_together
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.manifest import Manifest, sha256_hex
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import ObjectInfo, Objects
from kvkeep_storage.records import CacheRecord

_PARALLEL_DELETES = 4


def cache_record(key: GenerationKey, manifest: Manifest, content: bytes) -> CacheRecord:
    """The record that makes a generation the committed one. ``content`` is its stored manifest."""
    return CacheRecord(
        tenant=key.tenant,
        cache_id=key.cache_id,
        generation=key.generation,
        manifest_sha256=sha256_hex(content),
        ratio=manifest.ratios[-1],
        ratio_achieved=manifest.ratio_achieved,
        ratios=manifest.ratios,
        policy_applied=manifest.policy_applied,
        stored_bytes=sum(slab.size_bytes for slab in manifest.slabs) + len(content),
        model=manifest.fingerprint.model,
        committed_at=manifest.created_at,
        timings=manifest.timings,
        fidelity=manifest.fidelity,
    )


async def delete_generation(objects: Objects, key: GenerationKey) -> list[ObjectInfo]:
    """Delete every object of a generation and return them. May be repeated.

    The cache record must not name it any more. The manifest goes first, so that what a crash
    leaves is never taken for a whole generation. Raises: ObjectsUnavailable.
    """
    found = await objects.objects_below(key.prefix)
    await objects.delete(key.manifest)
    await run_together((objects.delete(item.key) for item in found), limit=_PARALLEL_DELETES)
    return found


async def release_generation(
    objects: Objects, metadata: Metadata, leases: Leases, key: GenerationKey
) -> bool:
    """Delete a generation unless its cache is read or built; False leaves it to the sweeper.

    The cache record must not name it any more: a reader takes its lease first and reads the
    record then, so nobody can begin to read it now. A reindex may have restored the record
    meanwhile; then the generation is kept.
    Raises: ObjectsUnavailable, MetadataUnavailable; the sweeper does the rest then as well.
    """
    async with alone(leases, key.tenant, key.cache_id) as is_alone:
        if not is_alone or await leases.readers(key.tenant, key.cache_id) > 0:
            return False
        live = await metadata.cache(key.tenant, key.cache_id)
        if live is None or live.generation != key.generation:
            await delete_generation(objects, key)
    return True


@asynccontextmanager
async def alone(leases: Leases, tenant: str, cache_id: str) -> AsyncIterator[bool]:
    """Keep builds, deletions and reindexing of a cache out for the length of a ``with`` block.

    Yields False when one of them is under way: then nothing is held. It is held for the time of
    one lease, since what is done meanwhile is short, and what a crash leaves must not keep
    builds waiting. Raises: MetadataUnavailable.
    """
    lease = await leases.acquire_build(tenant, cache_id, "alone")
    try:
        yield lease is not None
    finally:
        if lease is not None:
            await leases.release(lease)
