"""The records of storage in Redis or Valkey, and whether they belong to this object store.

    ContextIndex ─ ContextTable ─┐
    CacheTable ──────────────────┤
    UsageTable ──────────────────┼─ Metadata
    IdempotencyTable ────────────┘

Each table is a file of its own; leases and jobs are separate and share the connection.
"""

import time
from typing import Final, Self

from kvkeep_storage.caches import CacheTable
from kvkeep_storage.contexts import UNSET, ContextTable, Unset
from kvkeep_storage.idempotency import (
    IdempotencyTable,
    InFlight,
    Mismatch,
    Outcome,
    Replay,
    Started,
)
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

TIMEOUT_SECONDS: Final = 2.0


class Metadata(ContextTable, CacheTable, UsageTable, IdempotencyTable):
    """Every record of every tenant, behind one connection pool of one event loop.

    A call fails as MetadataUnavailable within three times the timeout; the next one connects
    anew. Nothing is sent twice.
    """

    @classmethod
    async def connect(cls, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Self:
        """Connect to a ``redis://``, ``rediss://`` or ``unix://`` URL and check that it answers.

        Raises: Invalid (a ValueError) for another scheme or a malformed URL, naming the scheme;
        MetadataUnavailable when nothing answers.
        """
        metadata = cls(RedisLink.open(url, timeout_seconds), time.time)
        try:
            await metadata.ping()
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
