"""Whatever happens to contexts, and wherever it is cut short, charges are what the records say."""

import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage.documents import delete_document
from kvkeep_storage.errors import StorageError
from kvkeep_storage.inventory import stored_generations
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.load import quarantine
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.quotas import Quotas, Usage
from kvkeep_storage.records import UNFINISHED
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.reindex import reindex
from kvkeep_storage.sweeper import Sweeper

from ...support.caches import facts_for, random_rows
from ...support.stores import TENANT, Stores, entries_below

pytestmark = pytest.mark.anyio

IDS = [f"ctx_{number}" for number in range(6)]
ROWS = [random_rows(seed, rows_max=seed + 2) for seed in range(3)]
FACTS = [facts_for(rows, tenant_salt=f"{seed}") for seed, rows in enumerate(ROWS)]
QUOTAS = Quotas(contexts=5, queued=4, bytes=1_000_000)


class History:
    """Things that happen to a tenant, chosen by a seed; any of them may be refused."""

    def __init__(self, stores: Stores, redis: Redis, seed: int) -> None:
        self.stores = stores
        self.redis = redis
        self.chosen = random.Random(seed)

    async def step(self) -> None:
        some: list[Callable[[], Awaitable[object]]] = [
            self.register,
            self.register,
            self.build,
            self.build,
            self.fail,
            self.delete,
            self.delete_half,
            self.expire,
            self.take_out,
            self.rebuild,
            self.sweep,
            self.lose_records,
        ]
        with suppress(StorageError, AssertionError):
            await self.chosen.choice(some)()

    def which(self) -> str:
        return self.chosen.choice(IDS)

    async def register(self) -> None:
        facts = replace(self.chosen.choice(FACTS), ratio=self.chosen.choice((0.1, 0.3)))
        size_bytes = self.chosen.randrange(2_000_000)
        await self.stores.register(facts, self.which(), full_bytes=size_bytes)

    async def build(self) -> None:
        number = self.chosen.randrange(3)
        await self.stores.build(ROWS[number], FACTS[number])

    async def fail(self) -> None:
        await self.stores.metadata.fail_context(TENANT, self.which(), "code", "detail")

    async def delete(self) -> None:
        key = DocumentKey(TENANT, self.which())
        await delete_document(self.stores.objects, key)
        await self.stores.metadata.delete_context(TENANT, key.context_id)

    async def delete_half(self) -> None:
        """A process that dies between the document and the record."""
        await delete_document(self.stores.objects, DocumentKey(TENANT, self.which()))

    async def expire(self) -> None:
        keys, context_id = TenantKeys(TENANT), self.which()
        if await self.redis.exists(keys.context(context_id)):
            past = time.time() - 1
            await self.redis.hset(keys.context(context_id), "expires_at", str(past))
            await self.redis.zadd(keys.expiry, {context_id: past})

    async def take_out(self) -> None:
        cache_id = self.chosen.choice(FACTS).fingerprint.digest
        cache = await self.stores.metadata.cache(TENANT, cache_id)
        assert cache is not None
        stores, generation = self.stores, cache.generation
        await quarantine(stores.objects, stores.metadata, TENANT, cache_id, generation)

    async def rebuild(self) -> None:
        await self.stores.metadata.rebuild_context(TENANT, self.which(), QUOTAS)

    async def sweep(self) -> None:
        cap_bytes = self.chosen.choice((None, 0))
        stores = self.stores
        sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, 0, store_bytes=cap_bytes)
        await sweeper.run_once()

    async def lose_records(self) -> None:
        await self.redis.flushall()
        await reindex(self.stores.objects, self.stores.metadata)


async def _expected(metadata: Metadata) -> Usage:
    """Worked out from nothing but the records."""
    records = (await metadata.contexts(TENANT, limit=100)).records
    raw = [
        stored
        for record in records
        for stored in await metadata.link.hashes([TenantKeys(TENANT).context(record.id)])
    ]
    size_bytes = 0
    for cache_id in {record.cache_id for record in records}:
        cache = await metadata.cache(TENANT, cache_id)
        waiting = [
            math.ceil(int(stored["full_bytes"]) * float(stored["ratio"]))
            for stored in raw
            # An expired context waits for its build until it is swept.
            if stored["cache_id"] == cache_id and stored["status"] in UNFINISHED
        ]
        size_bytes += max([0 if cache is None else cache.stored_bytes, *waiting])
    queued = [
        stored
        for stored in raw
        if stored["status"] in UNFINISHED or "refresh_requested_at" in stored
    ]
    return Usage(len(raw), len(queued), size_bytes)


@pytest.mark.parametrize("seed", range(4))
async def test_charges_equal_the_records_after_any_history(
    metadata: Metadata, redis: Redis, tmp_path: Path, seed: int
) -> None:
    stores = await Stores.open(tmp_path, metadata)
    history = History(stores, redis, seed)
    for _ in range(60):
        await history.step()
        assert await metadata.usage(TENANT) == await _expected(metadata)
    for context_id in IDS:
        await delete_document(stores.objects, DocumentKey(TENANT, context_id))
        await metadata.delete_context(TENANT, context_id)
    await Sweeper(stores.objects, metadata, stores.leases, 0).run_once()
    assert await metadata.usage(TENANT) == Usage(0, 0, 0)
    assert await stored_generations(stores.objects) == {}
    assert entries_below(tmp_path) == ["store.json"]
