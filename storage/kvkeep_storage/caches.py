"""Cache records in Redis: which generation of a cache is committed, and who refers to it."""

from collections.abc import Sequence
from typing import Literal

from kvkeep_storage import cache_scripts as scripts
from kvkeep_storage.context_index import context_ids
from kvkeep_storage.errors import Conflict, Invalid, LeaseLost, Unreferenced
from kvkeep_storage.hash_fields import hash_fields
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.record_codec import pairs
from kvkeep_storage.records import BuildLease, CacheRecord
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.redis_link import MAX_RACES, RedisTable, texts

Eviction = Literal["evicted", "busy", "gone"]


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
        ids of those are returned, and of those that were ready and waited for a fresh one.
        Repeating it under the same lease is harmless, and names only the ids that the repetition
        has changed.
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

    async def evict(self, tenant: str, cache_id: str, generation: str) -> Eviction:
        """Forget a committed generation that nobody needs now; its contexts stay ready.

        They are built again at their next question. "busy", and nothing changed, when a context
        waits for this cache or somebody builds or reads it; "gone" when the record does not
        name this generation. The objects are the caller's to delete, after "evicted".
        """
        keys = TenantKeys(tenant)
        outcome = await self._link.run(
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
        return "evicted" if outcome == "evicted" else "busy" if outcome == "busy" else "gone"

    async def live_generations(self, tenant: str) -> set[tuple[str, str]]:
        """Every committed (cache id, generation) of a tenant.

        Not a snapshot: a generation committed while this runs may be missing, so only objects
        older than a grace period may be swept by it.
        """
        return {(key.cache_id, key.generation) for key in await self._live(tenant)}

    async def live_caches(self, tenants: Sequence[str]) -> dict[GenerationKey, float]:
        """Every committed generation of some tenants, and when it was last of use.

        That is the last use of any of its contexts, or when it was committed: epoch seconds.
        """
        found: dict[GenerationKey, float] = {}
        for tenant in tenants:
            used_at = await self._last_uses(tenant)
            for key, committed_at in (await self._live(tenant)).items():
                found[key] = max(committed_at, used_at.get(key.cache_id, 0.0))
        return found

    async def _live(self, tenant: str) -> dict[GenerationKey, float]:
        """The committed generations of a tenant, and when each was committed."""
        keys = TenantKeys(tenant)
        ids = await self._link.members(keys.caches)
        caches = [keys.cache(item) for item in ids]
        found = await hash_fields(self._link, caches, "generation", "committed_at")
        return {
            GenerationKey(tenant, cache_id, generation): _seconds(committed_at)
            for cache_id, (generation, committed_at) in zip(ids, found, strict=True)
            if generation
        }

    async def _last_uses(self, tenant: str) -> dict[str, float]:
        """The last use of any context of each cache of a tenant, 0 for those never used."""
        keys = TenantKeys(tenant)
        contexts = [keys.context(item) for item in await context_ids(self._link, tenant)]
        used_at: dict[str, float] = {}
        for cache_id, used in await hash_fields(self._link, contexts, "cache_id", "last_used_at"):
            used_at[cache_id] = max(used_at.get(cache_id, 0.0), _seconds(used))
        return used_at

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


def _seconds(text: str) -> float:
    """A time of a record, 0 when it has none or a damaged one: that must not stop the others."""
    try:
        return float(text)
    except ValueError:
        return 0.0
