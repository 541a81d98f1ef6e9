"""The records of storage in Redis or Valkey, and whether they belong to this object store.

    ContextIndex ─ ContextTable ─┐
    CacheTable ──────────────────┤
    UsageTable ──────────────────┼─ Metadata
    IdempotencyTable ────────────┘

Each table is a file of its own; leases and jobs are separate and share the connection.
"""

import logging
import time
from typing import Final, Self

from kvkeep_storage.caches import CacheTable
from kvkeep_storage.contexts import UNSET, ContextTable, Unset
from kvkeep_storage.errors import MetadataUnavailable
from kvkeep_storage.idempotency import (
    IdempotencyTable,
    InFlight,
    Mismatch,
    Outcome,
    Replay,
    Started,
)
from kvkeep_storage.redis_checks import check_server
from kvkeep_storage.redis_keys import STORE_ID
from kvkeep_storage.redis_link import RedisLink
from kvkeep_storage.usage import UsageTable

__all__ = [
    "UNSET",
    "InFlight",
    "Metadata",
    "Mismatch",
    "Outcome",
    "Replay",
    "Started",
    "Unset",
]

_log = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 2.0

_PROBE: Final = "{kvkeep}:probe"
_PROBE_MS: Final = 60_000


class Metadata(ContextTable, CacheTable, UsageTable, IdempotencyTable):
    """Every record of every tenant, behind one connection pool of one event loop.

    A call fails as MetadataUnavailable within three times the timeout; the next one connects
    anew. Nothing is sent twice.
    """

    @classmethod
    async def connect(cls, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Self:
        """Connect to a URL of one of ``redis_link.SCHEMES`` and check what answers.

        One that may evict records, or refuses writes for now, is warned of.
        Raises: Invalid (a ValueError) for another scheme or a malformed URL, naming the scheme;
        MetadataUnavailable when nothing answers; Incompatible when it is too old.
        """
        metadata = cls(RedisLink.open(url, timeout_seconds), time.time)
        try:
            await metadata.ping()
            await check_server(metadata.link)
            await metadata._warn_if_read_only()
        except BaseException:
            await metadata.close()
            raise
        return metadata

    @property
    def link(self) -> RedisLink:
        """The connection, for leases and jobs."""
        return self._link

    async def ping(self) -> None:
        """Return when Redis answers and takes commands. Raises: MetadataUnavailable."""
        await self._link.command("PING")

    async def probe_writes(self) -> None:
        """Return when Redis takes writes: one full, or cut off from its replicas, only reads.

        In a cluster, one node is asked. Modifies: a key of its own that expires.
        Raises: MetadataUnavailable, with the reason that Redis gives.
        """
        await self._link.command("SET", _PROBE, 1, "PX", _PROBE_MS)

    async def close(self) -> None:
        """Close the connections. Modifies: this object, leases and jobs made from it."""
        await self._link.close()

    async def store_id(self) -> str | None:
        """The id of the object store that Redis was filled from; None when it was not."""
        found = await self._link.command("GET", STORE_ID)
        return None if found is None else str(found)

    async def bind_store(self, store_id: str) -> None:
        """Say which object store the records belong to, whatever was said before.

        Only for a new object store, or after a reindex: from here on, sweeping deletes what no
        record names.
        """
        await self._link.command("SET", STORE_ID, store_id)

    async def _warn_if_read_only(self) -> None:
        try:
            await self.probe_writes()
        except MetadataUnavailable as error:
            _log.warning("Redis refuses writes: %s", error.reason)
