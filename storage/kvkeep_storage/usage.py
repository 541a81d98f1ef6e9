"""How much of its quotas each tenant uses, and counting it again from the records."""

from kvkeep_storage import usage_scripts as scripts
from kvkeep_storage.context_index import context_ids
from kvkeep_storage.hash_fields import hash_fields
from kvkeep_storage.quotas import Usage
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.redis_link import RedisTable, texts


class UsageTable(RedisTable):
    """Read and recount what tenants are charged. All methods raise MetadataUnavailable."""

    async def usage(self, tenant: str) -> Usage:
        """What a tenant has now; not one snapshot of all three."""
        keys = TenantKeys(tenant)
        contexts = await self._link.command("ZCARD", keys.contexts)
        queued = await self._link.command("SCARD", keys.unfinished)
        total = await self._link.command("HGET", keys.charges, scripts.TOTAL)
        return Usage(int(str(contexts)), int(str(queued)), int(str(total or 0)))

    async def recount(self, tenant: str) -> int:
        """Work out every charge of a tenant again from its records; return their sum in bytes.

        For records that were written by an earlier version, or by hand. May run beside
        registrations, builds and deletions, and be repeated.
        """
        keys = TenantKeys(tenant)
        cache_ids = set(await self._link.members(keys.caches))
        ids = await context_ids(self._link, tenant)
        contexts = [keys.context(item) for item in ids]
        found = await hash_fields(self._link, contexts, "cache_id")
        for context_id, (cache_id,) in zip(ids, found, strict=True):
            if cache_id:
                cache_ids.add(cache_id)
                await self._link.run(
                    scripts.RECOUNT_CONTEXT,
                    [keys.context(context_id), keys.unfinished, keys.waiting(cache_id)],
                    [context_id],
                )
        cache_ids.update(texts(await self._link.command("HKEYS", keys.charges)))
        cache_ids.discard(scripts.TOTAL)
        for cache_id in sorted(cache_ids):
            await self._link.run(
                scripts.RECHARGE,
                [keys.cache(cache_id), keys.waiting(cache_id), keys.charges],
                [cache_id],
            )
        return int(str(await self._link.run(scripts.SUM, [keys.charges])))
