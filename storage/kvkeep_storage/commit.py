"""Making a built cache durable and visible: six steps, each of which may be the last.

1. The build lease is held. A crash: the lease runs out; nothing is stored.
2. The document is stored. A crash: the context is found unfinished and built again.
3. Slabs are put under a fresh generation. A crash: an orphan without a manifest.
4. Each slab's size is checked. A crash: the same.
5. The manifest is put. A crash: a whole generation that no record names, an orphan too.
6. One script points the record at the generation if the lease is still ours, and makes the
   waiting contexts ready. A crash after it: the cache is committed; the mirrors of its contexts
   are behind, which only a reindex reads, and it looks at the generations themselves.

Readers go by the record, so they see nothing before step 6 and everything after it. The sweeper
removes orphans after a grace period.
"""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from functools import partial

from kvkeep_storage.artifact import CacheRows
from kvkeep_storage.concurrency import run_together
from kvkeep_storage.documents import mirror_context
from kvkeep_storage.errors import (
    Conflict,
    Corrupt,
    Invalid,
    MetadataUnavailable,
    ObjectsUnavailable,
    StorageError,
)
from kvkeep_storage.generations import cache_record, delete_generation
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.manifest import Manifest, ManifestFacts
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import BuildLease, CacheRecord
from kvkeep_storage.retries import retrying
from kvkeep_storage.slab import SlabDigests, encode_slab

_log = logging.getLogger(__name__)

# Each slab is held in memory while it is written.
_SLABS_AT_ONCE = 2


def new_generation() -> str:
    """Name a generation; no two have the same name."""
    return secrets.token_hex(8)


async def commit(
    objects: Objects,
    metadata: Metadata,
    leases: Leases,
    lease: BuildLease,
    rows: CacheRows,
    facts: ManifestFacts,
    *,
    generation: str | None = None,
) -> CacheRecord:
    """Store a cache and make it the committed one; see the steps above.

    ``generation`` is what `new_generation` named, for one who has to know it beforehand.

    The build lease must be held and renewed by the caller; the document must be stored. After
    MetadataUnavailable the cache may or may not be committed: look at the record. After any
    other error it is not, and its objects are removed, now or by the sweeper.
    Raises: Invalid when rows, facts and lease disagree or a row is not finite; Full; LeaseLost,
    Unreferenced, Conflict (a higher ratio is committed); ObjectsUnavailable,
    MetadataUnavailable.
    """
    if facts.fingerprint.digest != lease.cache_id:
        raise Invalid("lease", f"it is for another cache than {facts.fingerprint.digest}")
    key = GenerationKey(lease.tenant, lease.cache_id, generation or new_generation())
    try:
        # A build whose lease has run out would be refused at the end: better before the writes.
        await leases.renew(lease)
        cache = await _store(objects, key, rows, facts)
        # Step 6. Repeating it under the same lease is harmless.
        ready = await retrying(partial(metadata.flip, cache, lease=lease, now=time.time()))
    except MetadataUnavailable:
        # The answer was lost, so the record may name the generation: it must stay.
        raise
    except StorageError:
        with suppress(ObjectsUnavailable):
            await delete_generation(objects, key)
        raise
    for context_id in ready:
        await _mirror(objects, metadata, DocumentKey(lease.tenant, context_id))
    return cache


async def _store(
    objects: Objects, key: GenerationKey, rows: CacheRows, facts: ManifestFacts
) -> CacheRecord:
    """Steps 3 to 5. A crash inside leaves an orphan, which no reader can find."""
    slabs = await run_together(
        (_put_slab(objects, key, rows, band) for band in range(len(rows.ratios))),
        limit=_SLABS_AT_ONCE,
    )
    for band, slab in enumerate(slabs):
        await _check_size(objects, key.slab(band), slab.size_bytes)
    manifest = Manifest.describe(rows, tuple(slabs), facts, created_at=time.time())
    content = manifest.encode()
    await _put_manifest(objects, key.manifest, content)
    return cache_record(key, manifest, content)


async def _put_slab(
    objects: Objects, key: GenerationKey, rows: CacheRows, band: int
) -> SlabDigests:
    slab = await asyncio.to_thread(encode_slab, rows, band)
    await retrying(partial(objects.put, key.slab(band), slab.content))
    return slab.digests


async def _check_size(objects: Objects, name: str, size_bytes: int) -> None:
    """The reply to the last part of an upload may be lost either way: what is stored decides."""
    stored_bytes = await retrying(partial(objects.size, name))
    if stored_bytes != size_bytes:
        raise Corrupt(name, f"{stored_bytes} bytes are stored, {size_bytes} were written")


async def _put_manifest(objects: Objects, name: str, content: bytes) -> None:
    """Put the manifest once; one that is there already must be our own earlier attempt."""

    async def put() -> None:
        try:
            await objects.put_if_absent(name, content)
        except Conflict:
            if await objects.get(name) != content:
                raise

    await retrying(put)


async def _mirror(objects: Objects, metadata: Metadata, key: DocumentKey) -> None:
    """The cache is committed by now, so a mirror that cannot be written must not undo it."""
    try:
        await retrying(partial(mirror_context, objects, metadata, key))
    except StorageError as error:
        _log.warning("context.json of %s is behind its record: %s", key.context_id, error)
