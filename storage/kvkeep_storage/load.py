"""Reading a committed cache: record → manifest → ranges → digests → rows, all or nothing.

Nothing is announced or handed over before every byte of it has matched its digest. What cannot
be read is retried a few times and never deleted. Bytes count as wrong only when the same wrong
ones were read twice, the second time from the store itself, the record still names them, and
the store is the one that Redis was filled from. Only the caller decides to ``quarantine`` them.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial

from kvkeep_storage.arrival import Announcer, LoadObserver
from kvkeep_storage.artifact import CacheRows
from kvkeep_storage.binding import require_bound
from kvkeep_storage.doubts import Doubts
from kvkeep_storage.errors import (
    Corrupt,
    Incompatible,
    Invalid,
    MetadataUnavailable,
    NotFound,
    ObjectsUnavailable,
)
from kvkeep_storage.fingerprint import ModelIdentity
from kvkeep_storage.generations import delete_generation
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.manifest import Manifest, sha256_hex
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.reading import Reading, StillWriting
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.retries import ATTEMPTS, retrying
from kvkeep_storage.sources import Origin, Source
from kvkeep_storage.spare_memory import Room, new_room

_log = logging.getLogger(__name__)

# Generations that may come and go under a reader before it gives up.
_GENERATIONS = 3


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCache:
    """A verified cache at the ratio asked for, with what describes it."""

    rows: CacheRows
    manifest: Manifest
    cache: CacheRecord
    source: Origin


async def load(
    source: Source,
    objects: Objects,
    metadata: Metadata,
    leases: Leases,
    tenant: str,
    cache_id: str,
    *,
    expected: ModelIdentity | None,
    ratio: float | None,
    first_ratio: float | None = None,
    observer: LoadObserver | None = None,
    room_for: Room = new_room,
) -> LoadedCache:
    """Load the committed generation of a cache, holding a read lease meanwhile.

    Every head's run is the exact prefix that ``ratio`` keeps; None is all. With ``first_ratio``
    the bands up to it are read and announced before any other is. Without ``expected`` any
    model's cache will do, for one who only verifies. The rows lie in memory of ``room_for``.
    Modifies nothing.
    Raises: NotFound when no generation is committed; Corrupt, naming cache and generation, when
    its bytes are proven wrong (see ``quarantine``); Incompatible for another model than
    ``expected`` or a newer schema; Invalid for a ratio that the cache is not cut at, or a
    ``first_ratio`` above ``ratio``; StoreMismatch; ObjectsUnavailable and MetadataUnavailable
    after bounded retries. After any of them, what ``observer`` was told stays valid.
    """
    announcer = Announcer(observer)
    async with leases.read_lease(tenant, cache_id):
        for _ in range(_GENERATIONS):
            cache = await metadata.cache(tenant, cache_id)
            if cache is None:
                break
            try:
                return await read_generation(
                    source, cache, expected, ratio, first_ratio, announcer, room_for
                )
            except (Corrupt, NotFound) as error:
                now = await metadata.cache(tenant, cache_id)
                if now is None or now.generation != cache.generation:
                    if announcer.has_told:
                        raise NotFound("cache generation", cache.generation) from error
                    continue
                await require_bound(objects, metadata)
                raise _proven(error, cache) from error
    raise NotFound("cache", cache_id)


async def read_generation(
    source: Source,
    cache: CacheRecord,
    expected: ModelIdentity | None,
    ratio: float | None,
    first_ratio: float | None,
    announcer: Announcer,
    room_for: Room = new_room,
) -> LoadedCache:
    """Read and verify one generation as its record describes it; see ``load``.

    Whoever calls this sees to it that the generation stays, and decides what an error proves.
    Raises: Corrupt, without a generation; NotFound when an object is missing; Incompatible,
    Invalid, ObjectsUnavailable.
    """
    key = GenerationKey(cache.tenant, cache.cache_id, cache.generation)
    origin = await source.origin(key.prefix)
    doubts = Doubts(source, key.prefix)
    manifest = await doubts.settle(partial(_read_manifest, source, key, cache))
    if expected is not None:
        _check_model(manifest.fingerprint.model_identity, expected)
    bands = manifest.bands(ratio)
    first = bands if first_ratio is None else manifest.bands(first_ratio)
    if first > bands:
        raise Invalid("first_ratio", f"{first_ratio} is above the ratio {ratio}")
    rows = await _read_rows(source, key, manifest, (first, bands), doubts, announcer, room_for)
    return LoadedCache(rows, manifest, cache, "store" if doubts.any else origin)


async def _read_rows(
    source: Source,
    key: GenerationKey,
    manifest: Manifest,
    ends: tuple[int, int],
    doubts: Doubts,
    announcer: Announcer,
    room_for: Room,
) -> CacheRows:
    """Read the bands up to ``ends[0]``, then those up to ``ends[1]``.

    Buffers that may still be written to are exchanged, unless the observer has them already.
    """
    first, bands = ends
    lost = 0
    while True:
        reading = await asyncio.to_thread(Reading, source, key, manifest, bands, doubts, room_for)
        announcer.expect(key.generation, manifest.num_layers, first)
        try:
            await reading.read(range(first), announcer)
            await reading.read(range(first, bands), None)
        except StillWriting as late:
            lost += 1
            if announcer.has_told or lost == ATTEMPTS:
                raise late.error from late
        else:
            return await asyncio.to_thread(reading.rows.whole)


async def quarantine(
    objects: Objects, metadata: Metadata, tenant: str, cache_id: str, generation: str
) -> list[str]:
    """Forget a generation that ``load`` has proven corrupt, then delete its objects.

    Modifies: the cache record, when it still names the generation, and every ready context of
    the cache, which becomes "rebuilding"; their ids are returned, for the caller to enqueue.
    Others that still read the generation find objects missing, never wrong bytes.
    Raises: MetadataUnavailable, and then nothing is changed or deleted.
    """
    rebuilding = await metadata.quarantine(tenant, cache_id, generation)
    try:
        await delete_generation(objects, GenerationKey(tenant, cache_id, generation))
    except ObjectsUnavailable as error:
        _log.warning("quarantined %s/%s is left to the sweeper: %s", cache_id, generation, error)
    # A reindex beside this may have seen it whole before it went, and named it again.
    with suppress(MetadataUnavailable):
        rebuilding += await metadata.quarantine(tenant, cache_id, generation)
    return list(dict.fromkeys(rebuilding))


async def _read_manifest(source: Source, key: GenerationKey, cache: CacheRecord) -> Manifest:
    content = await retrying(partial(source.get, key.manifest))
    if (found := sha256_hex(content)) != cache.manifest_sha256:
        reason = f"its sha256 is {found}, the record says {cache.manifest_sha256}"
        raise Corrupt(key.manifest, reason)
    manifest = Manifest.decode(content)
    if manifest.fingerprint.digest != cache.cache_id:
        raise Corrupt(key.manifest, "it describes another cache")
    return manifest


def _proven(error: Corrupt | NotFound, cache: CacheRecord) -> Corrupt:
    reason = error.reason if isinstance(error, Corrupt) else "is missing"
    return Corrupt(error.name, reason, cache_id=cache.cache_id, generation=cache.generation)


def _check_model(found: ModelIdentity, expected: ModelIdentity) -> None:
    for item in fields(ModelIdentity):
        here, wanted = getattr(found, item.name), getattr(expected, item.name)
        if here != wanted:
            raise Incompatible(item.name, repr(here), repr(wanted))
