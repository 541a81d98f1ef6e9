"""Removing what is no longer wanted: expired contexts, orphan generations, temporary files, and
what is more than the store may hold.

Safe in many processes at once, beside builds, loads and deletions. Nothing is done unless Redis
and the object store belong together, and that is asked again before each orphan goes: a Redis
flushed in mid-sweep must not make every cache look like an orphan.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvkeep_storage.binding import require_bound
from kvkeep_storage.documents import delete_document
from kvkeep_storage.errors import Invalid, ObjectsUnavailable, RecordCorrupt
from kvkeep_storage.generations import alone, delete_generation, release_generation
from kvkeep_storage.inventory import Stored, stored_generations
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.store_cap import Evicted, evict_to_cap, over_cap

_log = logging.getLogger(__name__)

# More than this wait for the next run.
_EXPIRED_MAX = 1000
# Of one run: a store that is away fails at everything, and takes its time over each.
_FAILURES_MAX = 10


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one run removed.

    ``unreferenced`` are the (tenant, cache id) that lost their last context by expiry: whoever
    holds them in memory must let go of them. ``evicted`` counts committed caches that went
    because the store was over its cap; their contexts stay. ``failed`` counts what the store did
    not remove now, and a later run will.
    """

    expired: int
    orphan_generations: int
    temp_files: int
    freed_bytes: int
    unreferenced: tuple[tuple[str, str], ...]
    evicted: int = 0
    failed: int = 0


class Sweeper:
    """Sweeps one object store and its records.

    ``grace_seconds`` is how long an expired context still says so, and how old the newest object
    of an orphan, or a temporary file, must be before it goes; it must be longer than any write
    and any difference between clocks. ``store_bytes`` caps the caches of all tenants together.
    """

    def __init__(
        self,
        objects: Objects,
        metadata: Metadata,
        leases: Leases,
        grace_seconds: float,
        *,
        store_bytes: int | None = None,
    ) -> None:
        """Keep the stores, which the caller closes. Raises: Invalid for a negative grace."""
        if grace_seconds < 0:
            raise Invalid("grace_seconds", f"{grace_seconds} is negative")
        self._objects = objects
        self._metadata = metadata
        self._leases = leases
        self._grace_seconds = grace_seconds
        self._store_bytes = store_bytes

    async def run_once(self) -> SweepReport:
        """Sweep everything once. A run that stops half-way is continued by the next one.

        What the store fails to remove is left to a later run, up to ten times; then this one ends.
        Raises: StoreMismatch when Redis and the object store do not belong together, and nothing
        more is removed then; ObjectsUnavailable, MetadataUnavailable.
        """
        await require_bound(self._objects, self._metadata)
        failures = _Failures()
        released = await self._delete_expired(failures)
        stored = await stored_generations(self._objects)
        orphans = await self._delete_orphans(stored, failures)
        temporary = await self._objects.delete_temporary_files(self._grace_seconds)
        evicted = await self._evict(stored)
        return SweepReport(
            expired=len(released),
            orphan_generations=len(orphans),
            temp_files=len(temporary),
            freed_bytes=sum(orphans) + sum(temporary) + evicted.size_bytes,
            unreferenced=tuple(cache for cache in released if cache is not None),
            evicted=evicted.caches,
            failed=failures.count,
        )

    async def look(self) -> SweepReport:
        """What a run would remove now; it does not look at temporary files. Modifies nothing.

        What is read or built now counts among the caches over the cap, although it would stay.
        Raises: as ``run_once``.
        """
        await require_bound(self._objects, self._metadata)
        before = time.time() - self._grace_seconds
        expired = await self._metadata.expired(before, _EXPIRED_MAX)
        stored = await stored_generations(self._objects)
        orphans = [
            stored[key].size_bytes
            for key in await self._not_live(stored)
            if not await self._is_young(key)
            and not await self._leases.is_building(key.tenant, key.cache_id)
            and await self._is_orphan(key)
        ]
        over = Evicted(0, 0)
        if self._store_bytes is not None:
            over = await over_cap(self._metadata, stored, self._store_bytes)
        return SweepReport(
            expired=sum([await self._has_expired(*context, before) for context in expired]),
            orphan_generations=len(orphans),
            temp_files=0,
            freed_bytes=sum(orphans) + over.size_bytes,
            unreferenced=(),
            evicted=over.caches,
        )

    async def _delete_expired(self, failures: "_Failures") -> list[tuple[str, str] | None]:
        """Delete contexts whose expiry lies a grace period back; return what each left behind.

        The document goes first, so that a crash in between leaves a record that is found again.
        An expired context cannot come back to life, so nothing can change its mind meanwhile.
        """
        before = time.time() - self._grace_seconds
        deleted: list[tuple[str, str] | None] = []
        for tenant, context_id in await self._metadata.expired(before, _EXPIRED_MAX):
            if not await self._has_expired(tenant, context_id, before):
                continue
            with failures.left_for_later():
                key = DocumentKey(tenant, context_id)
                await delete_document(self._objects, key)
                released = await self._metadata.delete_context(tenant, context_id)
                lost = None if released.cache_id is None else (tenant, released.cache_id)
                deleted.append(lost)
                # Somebody may have mirrored the record between the two.
                await self._objects.delete(key.mirror)
                if lost is not None and released.generation is not None:
                    last = GenerationKey(*lost, released.generation)
                    await release_generation(self._objects, self._metadata, self._leases, last)
        return deleted

    async def _has_expired(self, tenant: str, context_id: str, before: float) -> bool:
        """The expiry index is a hint; the record decides."""
        try:
            record = await self._metadata.context(tenant, context_id)
        except RecordCorrupt as error:
            # One damaged record must not keep everything else from being swept.
            _log.warning("not swept: %s", error)
            return False
        return record is not None and record.expires_at is not None and record.expires_at <= before

    async def _evict(self, stored: dict[GenerationKey, Stored]) -> Evicted:
        if self._store_bytes is None:
            return Evicted(0, 0)
        return await evict_to_cap(
            self._objects, self._metadata, self._leases, stored, self._store_bytes
        )

    async def _delete_orphans(
        self, stored: dict[GenerationKey, Stored], failures: "_Failures"
    ) -> list[int]:
        """Delete generations that no record names; return the bytes of each."""
        freed_bytes = []
        for key in await self._not_live(stored):
            with failures.left_for_later():
                if await self._is_young(key):
                    continue
                async with alone(self._leases, key.tenant, key.cache_id) as is_alone:
                    if is_alone and await self._is_orphan(key):
                        found = await delete_generation(self._objects, key)
                        freed_bytes.append(sum(item.size_bytes for item in found))
        return freed_bytes

    async def _is_young(self, key: GenerationKey) -> bool:
        """Whether anything of it was written within the grace period, or it is gone by now."""
        found = await self._objects.objects_below(key.prefix)
        if not found:
            return True
        return time.time() - max(item.modified_at for item in found) < self._grace_seconds

    async def _not_live(self, stored: Iterable[GenerationKey]) -> list[GenerationKey]:
        """Those that no record seems to name: a quick look, so that most need no second one."""
        stored = list(stored)
        live = {
            (tenant, *generation)
            for tenant in {key.tenant for key in stored}
            for generation in await self._metadata.live_generations(tenant)
        }
        return [key for key in stored if (key.tenant, key.cache_id, key.generation) not in live]

    async def _is_orphan(self, key: GenerationKey) -> bool:
        """Whether a generation may be deleted, by one who keeps builds and reindexing out.

        The order matters. Neither can make this generation live any more; and the record read
        after that is believed only if Redis still belongs to this store afterwards.
        """
        if await self._leases.readers(key.tenant, key.cache_id) > 0:
            return False
        is_live = await self._is_live(key)
        await require_bound(self._objects, self._metadata)
        return not is_live

    async def _is_live(self, key: GenerationKey) -> bool:
        live = await self._metadata.cache(key.tenant, key.cache_id)
        return live is not None and live.generation == key.generation


class _Failures:
    """What one run could not remove, as far as it goes on."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def left_for_later(self) -> Iterator[None]:
        """Go on behind the block when the store fails in it, unless it has failed too often."""
        try:
            yield
        except ObjectsUnavailable as error:
            self.count += 1
            if self.count == _FAILURES_MAX:
                raise
            _log.warning("left to the next sweep: %s", error)
