"""Reading a committed cache: record → manifest → ranges → digests → rows, all or nothing.

Nothing is handed over before every byte of it has matched its digest. What cannot be read is
retried a few times and never deleted. Bytes count as wrong only when they were read twice, the
record still names them, and the store is the one that Redis was filled from. Only the caller
decides to ``quarantine`` them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import numpy as np

from kvkeep_storage.arrival import ArrivingRows, LoadObserver
from kvkeep_storage.artifact import CacheRows, RowBytes
from kvkeep_storage.binding import require_bound
from kvkeep_storage.concurrency import run_together
from kvkeep_storage.errors import (
    Corrupt,
    Incompatible,
    Invalid,
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
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.retries import retrying
from kvkeep_storage.slab import empty_layers, scatter_slab, verify_slab
from kvkeep_storage.sources import Origin, Source

_log = logging.getLogger(__name__)

# Each slab is held in memory until its rows are in place.
_SLABS_AT_ONCE = 2
# Generations that may come and go under a reader before it gives up.
_GENERATIONS = 3

Result = TypeVar("Result")


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
    expected: ModelIdentity,
    ratio: float | None,
    first_ratio: float | None = None,
    observer: LoadObserver | None = None,
) -> LoadedCache:
    """Load the committed generation of a cache, holding a read lease meanwhile.

    Every head's run is the exact prefix that ``ratio`` keeps; None is all. With ``first_ratio``
    the bands up to it are read and announced before any other is. Modifies nothing.
    Raises: NotFound when no generation is committed; Corrupt, naming cache and generation, when
    its bytes are proven wrong (see ``quarantine``); Incompatible for another model than
    ``expected`` or a newer schema; Invalid for a ratio that the cache is not cut at, or a
    ``first_ratio`` above ``ratio``; StoreMismatch; ObjectsUnavailable and MetadataUnavailable
    after bounded retries. After any of them, what ``observer`` was told stays valid.
    """
    announced = _Announced(observer)
    async with leases.read_lease(tenant, cache_id):
        for _ in range(_GENERATIONS):
            cache = await metadata.cache(tenant, cache_id)
            if cache is None:
                break
            try:
                return await _load_generation(
                    source, cache, expected, ratio, first_ratio, announced
                )
            except (Corrupt, NotFound) as error:
                now = await metadata.cache(tenant, cache_id)
                if now is None or now.generation != cache.generation:
                    if announced.anything:
                        raise NotFound("cache generation", cache.generation) from error
                    continue
                await require_bound(objects, metadata)
                raise _proven(error, cache) from error
    raise NotFound("cache", cache_id)


async def _load_generation(
    source: Source,
    cache: CacheRecord,
    expected: ModelIdentity,
    ratio: float | None,
    first_ratio: float | None,
    announced: "_Announced",
) -> LoadedCache:
    key = GenerationKey(cache.tenant, cache.cache_id, cache.generation)
    origin = await source.origin(key.prefix)
    manifest = await _proving(source, key, lambda: _read_manifest(source, key, cache))
    _check_model(manifest.fingerprint.model_identity, expected)
    bands = manifest.bands(ratio)
    first = bands if first_ratio is None else manifest.bands(first_ratio)
    if first > bands:
        raise Invalid("first_ratio", f"{first_ratio} is above the ratio {ratio}")
    counts = manifest.counts_array()[:bands]
    layers = await asyncio.to_thread(empty_layers, counts, manifest.row_bytes)
    rows = ArrivingRows(
        manifest.dtype,
        manifest.num_kv_heads,
        manifest.head_dim,
        manifest.ratios[:bands],
        counts,
        manifest.protected_array(),
        layers,
    )
    for some in (range(first), range(first, bands)):
        await run_together(
            (
                _proving(
                    source, key, partial(_read_slab, source, key.slab(band), manifest, band, rows)
                )
                for band in some
            ),
            limit=_SLABS_AT_ONCE,
        )
        if some.start == 0:
            announced.first(rows, manifest)
    return LoadedCache(await asyncio.to_thread(rows.whole), manifest, cache, origin)


class _Announced:
    """Tells an observer, and remembers whether it was told anything."""

    def __init__(self, observer: LoadObserver | None) -> None:
        self.anything = False
        self._observer = observer

    def first(self, rows: ArrivingRows, manifest: Manifest) -> None:
        """Every layer of the first bands is verified."""
        if self._observer is None:
            return
        self.anything = True
        self._observer.on_room(rows, manifest)
        for index in range(len(rows.layers)):
            self._observer.on_layer(index)
        self._observer.on_first()


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
    return rebuilding


async def _read_manifest(source: Source, key: GenerationKey, cache: CacheRecord) -> Manifest:
    content = await retrying(partial(source.get, key.manifest))
    if sha256_hex(content) != cache.manifest_sha256:
        raise Corrupt(key.manifest, "its sha256 differs from the record's")
    manifest = Manifest.decode(content)
    if manifest.fingerprint.digest != cache.cache_id:
        raise Corrupt(key.manifest, "it describes another cache")
    return manifest


async def _read_slab(
    source: Source, name: str, manifest: Manifest, band: int, rows: ArrivingRows
) -> None:
    """Read, verify and scatter one slab. Modifies: this band's rows in ``rows``."""
    digests = manifest.slabs[band].digests

    async def read() -> RowBytes:
        # New memory for each try: a read that missed its deadline may still write to its own.
        content = np.empty(digests.size_bytes, np.uint8)
        if (stored_bytes := await source.size(name)) != len(content):
            raise Corrupt(name, f"{stored_bytes} bytes are stored, {len(content)} were written")
        await source.read_ranges(name, 0, [content.data])
        return content

    def verify_and_scatter(content: RowBytes) -> None:
        counts = rows.counts[band]
        slab = verify_slab(content, digests, counts, manifest.dtype, manifest.head_dim)
        scatter_slab(slab, band, rows.counts, rows.layers)

    content = await retrying(read)
    try:
        await asyncio.to_thread(verify_and_scatter, content)
    except Corrupt as error:
        raise Corrupt(f"{name}: {error.name}", error.reason) from error


async def _proving(
    source: Source, key: GenerationKey, read: Callable[[], Awaitable[Result]]
) -> Result:
    """Read again, from the store itself, when bytes are wrong: only that proves them wrong."""
    try:
        return await read()
    except Corrupt:
        await source.forget(key.prefix)
        return await read()


def _proven(error: Corrupt | NotFound, cache: CacheRecord) -> Corrupt:
    reason = error.reason if isinstance(error, Corrupt) else "is missing"
    return Corrupt(error.name, reason, cache_id=cache.cache_id, generation=cache.generation)


def _check_model(found: ModelIdentity, expected: ModelIdentity) -> None:
    for item in fields(ModelIdentity):
        here, wanted = getattr(found, item.name), getattr(expected, item.name)
        if here != wanted:
            raise Incompatible(item.name, repr(here), repr(wanted))
