"""Sweeps without any grace, evictions, builds and loads of the same caches, all at once."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvkeep_storage.errors import NotFound
from kvkeep_storage.inventory import stored_generations
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.sweeper import Sweeper

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores

pytestmark = pytest.mark.anyio

SECONDS = 1.5
ROWS = [random_rows(seed) for seed in range(3)]
FACTS = [facts_for(rows, tenant_salt=f"{seed}") for seed, rows in enumerate(ROWS)]


async def test_a_load_beside_sweeps_gives_the_rows_or_says_that_there_are_none(
    metadata: Metadata, tmp_path: Path
) -> None:
    stores = await Stores.open(tmp_path, metadata)
    for number, facts in enumerate(FACTS):
        await stores.register(facts, f"ctx_{number}")
        await stores.build(ROWS[number], facts)
    end = time.monotonic() + SECONDS
    loaded, missed, evicted = 0, 0, 0

    async def load(number: int) -> None:
        nonlocal loaded, missed
        while time.monotonic() < end:
            try:
                rows = (await stores.load(FACTS[number])).rows
            except NotFound:
                missed += 1
            else:
                assert_equal_rows(rows, ROWS[number])
                loaded += 1
            # A cache that is read without a pause is never evicted.
            await asyncio.sleep(0.01)

    async def build(number: int) -> None:
        while time.monotonic() < end:
            if await metadata.cache(TENANT, FACTS[number].fingerprint.digest) is None:
                # A sweep may hold the lease or, without grace, take a file that is being written.
                with suppress(AssertionError, NotFound):
                    await stores.build(ROWS[number], FACTS[number])
            await asyncio.sleep(0.02)

    async def sweep() -> None:
        nonlocal evicted
        sweeper = Sweeper(stores.objects, metadata, stores.leases, 0, store_bytes=0)
        while time.monotonic() < end:
            evicted += (await sweeper.run_once()).evicted
            await asyncio.sleep(0.01)

    await asyncio.gather(
        *(load(number) for number in range(3)), *(build(number) for number in range(3)), sweep()
    )
    assert min(loaded, missed, evicted) > 0
    await Sweeper(stores.objects, metadata, stores.leases, 0).run_once()
    stored = {(key.cache_id, key.generation) for key in await stored_generations(stores.objects)}
    assert stored == await metadata.live_generations(TENANT)
    for facts in FACTS:
        assert await stores.leases.readers(TENANT, facts.fingerprint.digest) == 0
