"""Who may build a cache, and who reads it; every lease runs out by itself.

A build lease is the right to commit; its fencing token is compared inside the commit, so the
lease only saves work, and correctness does not hang on clocks. A read lease says that objects of
a cache are being read; a deleter looks at ``readers`` after it removed the record, and a reader
reads the record after it took the lease.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from kvkeep_storage.errors import LeaseLost, MetadataUnavailable
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import BuildLease
from kvkeep_storage.redis_keys import LEASE_PATTERN, TenantKeys

__all__ = ["BuildLease", "Leases"]

LEASE_TTL_SECONDS: Final = 10.0
RENEW_SECONDS: Final = 2.0

# KEYS lease fence    ARGV owner ttl_ms    -> the fencing token, or nil while somebody holds it
# A lost counter (a flushed Redis) starts again at the clock, above every token ever given out.
_ACQUIRE_BUILD: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 then return nil end
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('SET', KEYS[2], redis.call('TIME')[1] .. '000000')
end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], string.format('%.0f', token) .. ':' .. ARGV[1], 'PX', ARGV[2])
return token
"""

# KEYS lease    ARGV value ttl_ms    -> 1, or 0 when it is no longer ours
_RENEW_BUILD: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS lease    ARGV value    -> 1, or 0 when it was not ours
_RELEASE_BUILD: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

_NOW_MS: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

# KEYS readers    ARGV reader ttl_ms    Takes and renews alike: a forgotten lease comes back.
_HOLD_READ: Final = (
    _NOW_MS
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
)

# KEYS readers    -> how many leases have not run out
_READERS: Final = (
    _NOW_MS
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZCARD', KEYS[1])
"""
)


class Leases:
    """Build leases with fencing tokens, and read leases. All methods raise MetadataUnavailable.

    A lease lasts ``ttl_seconds`` after it was taken or renewed, by the clock of the server.
    """

    def __init__(
        self,
        metadata: Metadata,
        *,
        ttl_seconds: float = LEASE_TTL_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        """``renew_seconds`` is how often a read lease is renewed while it is held."""
        self._link = metadata.link
        self._ttl_seconds = ttl_seconds
        self._renew_seconds = renew_seconds
        self._living: set[asyncio.Task[None]] = set()

    async def acquire_build(
        self, tenant: str, cache_id: str, owner: str, ttl: float | None = None
    ) -> BuildLease | None:
        """Take the right to build a cache; None while anybody holds it, the same owner included.

        ``ttl`` in seconds replaces the usual one for this lease.
        """
        ttl_seconds = self._ttl_seconds if ttl is None else ttl
        keys = TenantKeys(tenant)
        token = await self._link.run(
            _ACQUIRE_BUILD, [keys.build_lease(cache_id), keys.fence], [owner, _ms(ttl_seconds)]
        )
        if not isinstance(token, int):
            return None
        return BuildLease(tenant, cache_id, owner, token, ttl_seconds)

    async def renew(self, lease: BuildLease) -> None:
        """Let a build lease last its full time from now.

        Raises: LeaseLost when it ran out, even if nobody took it since.
        """
        key = TenantKeys(lease.tenant).build_lease(lease.cache_id)
        if await self._link.run(_RENEW_BUILD, [key], [lease.value, _ms(lease.ttl_seconds)]) != 1:
            raise LeaseLost("build lease", lease.cache_id, lease.owner)

    async def release(self, lease: BuildLease) -> None:
        """Give a build lease back; one that is no longer ours is left alone."""
        key = TenantKeys(lease.tenant).build_lease(lease.cache_id)
        await self._link.run(_RELEASE_BUILD, [key], [lease.value])

    async def is_building(self, tenant: str, cache_id: str) -> bool:
        """Whether anybody holds the build lease of a cache."""
        key = TenantKeys(tenant).build_lease(cache_id)
        return await self._link.command("EXISTS", key) == 1

    @asynccontextmanager
    async def read_lease(self, tenant: str, cache_id: str) -> AsyncIterator[None]:
        """Hold a read lease, renewed in the background, for the length of a ``with`` block.

        While Redis is away it cannot be renewed and may run out; then a deletion may take
        objects from under the reader, which sees that as missing objects, never as wrong bytes.
        """
        key = TenantKeys(tenant).read_leases(cache_id)
        reader = secrets.token_hex(8)
        over = asyncio.Event()
        # Neither task is cancelled with the reader: a command that is cancelled on its way may
        # still be carried out, and after the one that gives the lease back.
        taking = asyncio.create_task(self._hold(key, reader))
        living = asyncio.create_task(self._live(key, reader, taking, over))
        self._living.add(living)
        living.add_done_callback(self._living.discard)
        try:
            await asyncio.shield(taking)
            yield
        finally:
            over.set()
            await asyncio.wait([living])

    async def readers(self, tenant: str, cache_id: str) -> int:
        """How many read leases of a cache have not run out."""
        found = await self._link.run(_READERS, [TenantKeys(tenant).read_leases(cache_id)])
        return found if isinstance(found, int) else 0

    async def void_all(self) -> None:
        """End every lease of every tenant, held or not.

        Only for a start that owns the whole data directory: no other process can be alive.
        """
        for key in await self._link.keys(LEASE_PATTERN):
            await self._link.command("DEL", key)

    async def _hold(self, key: str, reader: str) -> None:
        await self._link.run(_HOLD_READ, [key], [reader, _ms(self._ttl_seconds)])

    async def _live(
        self, key: str, reader: str, taking: asyncio.Task[None], over: asyncio.Event
    ) -> None:
        await asyncio.wait([taking])
        if taking.exception() is not None:
            return
        while not over.is_set():
            try:
                async with asyncio.timeout(self._renew_seconds):
                    await over.wait()
            except TimeoutError:
                with suppress(MetadataUnavailable):
                    await self._hold(key, reader)
        # What was read is read; a lease that cannot be given back runs out by itself.
        with suppress(MetadataUnavailable):
            await self._link.command("ZREM", key, reader)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
