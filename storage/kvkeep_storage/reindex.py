"""Writing the records again from the objects, after Redis was flushed or lost.

A context comes back when both its document and its mirror are there; a deletion removed both
before it was answered, so what was deleted stays deleted. A cache comes back from the generation
whose manifest and sizes are whole. Records that exist are left as they are, so a reindex may be
repeated and may run beside the service.
"""

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from kvkeep_storage import keys
from kvkeep_storage.documents import ContextMirror, get_mirror
from kvkeep_storage.errors import (
    Corrupt,
    Incompatible,
    Invalid,
    NotFound,
    StoreMismatch,
)
from kvkeep_storage.generations import alone, cache_record
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.manifest import Manifest
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import CacheRecord, ContextRecord, Expiry


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """What came back. ``damaged`` names what could not, with the reason."""

    contexts: int
    caches: int
    damaged: tuple[str, ...]


async def reindex(objects: Objects, metadata: Metadata) -> ReindexReport:
    """Restore every record that is missing, count all usage, and bind Redis to this object store.

    A context without a whole cache comes back unfinished, to be built again. An expiry that
    counts from the last use starts anew, because uses are not mirrored.
    Raises: StoreMismatch when Redis was filled from another object store; Full, Corrupt,
    ObjectsUnavailable, MetadataUnavailable. After any error it may be repeated.
    """
    store_id, recorded = await objects.store_id(), await metadata.store_id()
    if recorded not in (None, store_id):
        raise StoreMismatch(store_id, recorded)
    run = _Reindex(objects, metadata)
    for tenant in await objects.directories_below(keys.DOCUMENTS):
        by_cache: dict[str, list[ContextMirror]] = {}
        for context_id in await objects.directories_below(f"{keys.DOCUMENTS}/{tenant}"):
            try:
                mirror = await run.restore_context(DocumentKey(tenant, context_id))
            except (Corrupt, Incompatible, Invalid) as error:
                run.damaged.append(f"{tenant}/{context_id}: {error}")
                continue
            if mirror is not None:
                by_cache.setdefault(mirror.record.cache_id, []).append(mirror)
        for mirrors in by_cache.values():
            await run.restore_cache(mirrors)
    for tenant in await metadata.tenants():
        # Records that were there may be of a version that charged nobody.
        await metadata.recount(tenant)
    await metadata.bind_store(store_id)
    return ReindexReport(run.contexts, run.caches, tuple(run.damaged))


@dataclass(slots=True)
class _Reindex:
    objects: Objects
    metadata: Metadata
    contexts: int = 0
    caches: int = 0
    damaged: list[str] = field(default_factory=list)

    async def restore_context(self, key: DocumentKey) -> ContextMirror | None:
        """Bring one context back, without its cache; None when its objects are not all there."""
        try:
            mirror = await get_mirror(self.objects, key)
            await self.objects.size(key.body)
        except NotFound:
            self.damaged.append(f"{key.tenant}/{key.context_id}: document or mirror is missing")
            return None
        if await self.metadata.restore_context(_unbuilt(mirror.record, time.time())):
            self.contexts += 1
        await self._undo_if_deleted(key, None)
        return mirror

    async def restore_cache(self, mirrors: Sequence[ContextMirror]) -> None:
        """Bring the cache of these contexts back when there is a whole generation of it.

        All of them are looked at first: the mirror of one that was ready already is not written
        again when another of them has a larger generation committed.
        """
        record = mirrors[0].record
        named = {mirror.generation for mirror in mirrors if mirror.generation is not None}
        async with alone(Leases(self.metadata), record.tenant, record.cache_id) as is_alone:
            # Who builds or deletes it now settles what becomes of it.
            cache = await self._find_cache(record, named) if is_alone else None
            is_restored = cache is not None and await self.metadata.restore_cache(cache)
        if is_restored:
            self.caches += 1
        for mirror in mirrors:
            record = mirror.record
            await self.metadata.attach(record.tenant, record.id, time.time())
            key = DocumentKey(record.tenant, record.id)
            await self._undo_if_deleted(key, cache if is_restored else None)

    async def _undo_if_deleted(self, key: DocumentKey, restored: CacheRecord | None) -> None:
        """A deletion may have run between reading the mirror and writing the records.

        The objects of a cache without contexts are left to the sweeper.
        """
        try:
            await self.objects.size(key.body)
        except NotFound:
            await self.metadata.delete_context(key.tenant, key.context_id)
            if restored is not None:
                # The deletion knew nothing of this record, and may be deleting what it names.
                await self.metadata.quarantine(key.tenant, restored.cache_id, restored.generation)

    async def _find_cache(self, record: ContextRecord, named: Set[str]) -> CacheRecord | None:
        """The generation that was committed last, or else the most complete of the others."""
        prefix = f"{keys.CACHES}/{record.tenant}/{record.cache_id}"
        found = []
        for generation in await self.objects.directories_below(prefix):
            key = GenerationKey(record.tenant, record.cache_id, generation)
            cache = await self._read_generation(key)
            if cache is not None:
                found.append(cache)
        return max(found, key=lambda cache: _preference(cache, named), default=None)

    async def _read_generation(self, key: GenerationKey) -> CacheRecord | None:
        """Describe a generation whose manifest is whole and whose slabs have their sizes."""
        try:
            content = await self.objects.get(key.manifest)
            manifest = Manifest.decode(content)
            if manifest.fingerprint.digest != key.cache_id:
                return None
            for band, slab in enumerate(manifest.slabs):
                if await self.objects.size(key.slab(band)) != slab.size_bytes:
                    return None
        except (NotFound, Corrupt, Incompatible):
            return None
        return cache_record(key, manifest, content)


def _preference(cache: CacheRecord, named: Set[str]) -> tuple[bool, float, float]:
    """Sort key. What a mirror names was committed, and the last of those is the one that was.

    Of the others a later one may be without a flip: what holds most serves most contexts.
    """
    is_named = cache.generation in named
    return is_named, cache.committed_at if is_named else 0.0, cache.ratio


def _unbuilt(record: ContextRecord, now: float) -> ContextRecord:
    """The record as it was before a cache was attached to it; a failure stays one."""
    expires_at = record.expires_at
    if record.expires_anchor == "last_used_at" and record.expires_seconds is not None:
        expires_at = Expiry(record.expires_anchor, record.expires_seconds).at(now, now)
    unbuilt = record if record.status == "failed" else record.without_cache()
    return replace(unbuilt, expires_at=expires_at)
