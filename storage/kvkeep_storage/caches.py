"""Cache records in Redis: which generation of a cache is committed, and who refers to it."""

from kvkeep_storage import cache_scripts as scripts
from kvkeep_storage.errors import Conflict, Invalid, LeaseLost, Unreferenced
from kvkeep_storage.record_codec import pairs
from kvkeep_storage.records import BuildLease, CacheRecord
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.redis_link import MAX_RACES, RedisTable, texts


class CacheTable(RedisTable):
    """Commit, read and quarantine the caches of tenants. All methods raise MetadataUnavailable."""

    async def cache(self, tenant: str, cache_id: str) -> CacheRecord | None:
        """The committed generation of a cache; None when there is none. Raises: RecordCorrupt."""
        (stored,) = await self._link.hashes([TenantKeys(tenant).cache(cache_id)])
        return CacheRecord.from_hash(stored) if stored else None

    async def flip(self, cache: CacheRecord, *, lease: BuildLease, now: float) -> list[str]:
        """Point the cache record at a new generation, and make waiting contexts ready.

        The build lease must be held: one script compares it, then changes everything. Ready at
        once is every referencing context that waits and asked for one of the cache's ratios; the
        ids of those are returned. Repeating it under the same lease is harmless, and names only
        the ids made ready by the repetition.
        Raises: LeaseLost when the lease ran out or has a newer holder, Unreferenced when every
        context was deleted, Conflict when more than this is committed already. Nothing is
        changed in any of these; the new generation belongs to nobody.
        """
        if (cache.tenant, cache.cache_id) != (lease.tenant, lease.cache_id):
            raise Invalid("lease", f"it is for {lease.cache_id!r}, not for {cache.cache_id!r}")
        keys = TenantKeys(cache.tenant)
        stored = pairs(cache.to_hash())
        for _ in range(MAX_RACES):
            ids = await self._link.members(keys.references(cache.cache_id))
            outcome, *ready = texts(
                await self._link.run(
                    scripts.FLIP,
                    [
                        keys.build_lease(cache.cache_id),
                        keys.cache(cache.cache_id),
                        keys.caches,
                        keys.references(cache.cache_id),
                        keys.unfinished,
                        keys.waiting(cache.cache_id),
                        keys.charges,
                        *(keys.context(item) for item in ids),
                    ],
                    [lease.value, cache.cache_id, now, len(ids), *ids, *stored],
                )
            )
            if outcome != "retry":
                _refuse(outcome, lease)
                return ready
        raise Conflict("cache", cache.cache_id, f"its contexts changed {MAX_RACES} times")

    async def quarantine(self, tenant: str, cache_id: str, generation: str) -> list[str]:
        """Forget a committed generation that is proven wrong.

        If the record still names it: the record goes and every ready context of it becomes
        "rebuilding"; their ids are returned, for the caller to enqueue. Otherwise nothing is
        changed and the list is empty. The objects are the caller's to delete, afterwards.
        """
        keys = TenantKeys(tenant)
        for _ in range(MAX_RACES):
            ids = await self._link.members(keys.references(cache_id))
            outcome, *rebuilding = texts(
                await self._link.run(
                    scripts.QUARANTINE,
                    [
                        keys.cache(cache_id),
                        keys.caches,
                        keys.references(cache_id),
                        keys.unfinished,
                        keys.waiting(cache_id),
                        keys.charges,
                        *(keys.context(item) for item in ids),
                    ],
                    [cache_id, generation, len(ids), *ids],
                )
            )
            if outcome != "retry":
                return rebuilding
        raise Conflict("cache", cache_id, f"its contexts changed {MAX_RACES} times")

    async def evict(self, tenant: str, cache_id: str, generation: str) -> bool:
        """Forget a committed generation that nobody needs now; its contexts stay ready.

        They are built again at their next question. False, and nothing changed, when the record
        names another generation, a context waits for this cache, or somebody builds or reads
        it. The objects are the caller's to delete, afterwards.
        """
        keys = TenantKeys(tenant)
        evicted = await self._link.run(
            scripts.EVICT,
            [
                keys.cache(cache_id),
                keys.caches,
                keys.waiting(cache_id),
                keys.charges,
                keys.build_lease(cache_id),
                keys.read_leases(cache_id),
            ],
            [cache_id, generation],
        )
        return evicted == 1

    async def live_generations(self, tenant: str) -> set[tuple[str, str]]:
        """Every committed (cache id, generation) of a tenant.

        Not a snapshot: a generation committed while this runs may be missing, so only objects
        older than a grace period may be swept by it.
        """
        keys = TenantKeys(tenant)
        ids = await self._link.members(keys.caches)
        found = await self._link.hashes([keys.cache(item) for item in ids])
        return {
            (cache_id, stored["generation"])
            for cache_id, stored in zip(ids, found, strict=True)
            if stored
        }

    async def restore_cache(self, cache: CacheRecord) -> bool:
        """Write a cache record unless there is one; False when there is. For a reindex."""
        keys = TenantKeys(cache.tenant)
        written = await self._link.run(
            scripts.RESTORE_CACHE,
            [
                keys.cache(cache.cache_id),
                keys.caches,
                keys.waiting(cache.cache_id),
                keys.charges,
            ],
            [cache.cache_id, *pairs(cache.to_hash())],
        )
        return written == 1


def _refuse(outcome: str, lease: BuildLease) -> None:
    if outcome == "lost":
        raise LeaseLost("build lease", lease.cache_id, lease.owner)
    if outcome == "unreferenced":
        raise Unreferenced(lease.cache_id)
    if outcome == "lower":
        raise Conflict("cache", lease.cache_id, "it is committed at a higher ratio already")
