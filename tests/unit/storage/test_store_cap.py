"""The size cap of the whole store, over real stores."""

import asyncio
import time
from pathlib import Path

import pytest

from kvkeep_storage.errors import NotFound, StoreMismatch
from kvkeep_storage.inventory import stored_generations
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.store_cap import Evicted, evict_to_cap
from kvkeep_storage.sweeper import Sweeper, SweepReport

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores, files_below

pytestmark = pytest.mark.anyio

ROWS = random_rows()
FACTS = [facts_for(ROWS, tenant_salt=f"{i}") for i in range(4)]


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path) -> Stores:
    return await Stores.open(tmp_path, metadata)


async def _built(stores: Stores) -> list[CacheRecord]:
    """Four caches of one context each, committed one after the other."""
    caches = []
    for i, facts in enumerate(FACTS):
        await stores.register(facts, f"ctx_{i}")
        caches.append(await stores.build(ROWS, facts))
    return caches


async def _sweep(stores: Stores, cap_bytes: int) -> SweepReport:
    sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, 3600, store_bytes=cap_bytes)
    return await sweeper.run_once()


async def _left(stores: Stores) -> list[int]:
    """Which of the four caches are there, records and objects agreeing."""
    stored = {key.generation for key in await stored_generations(stores.objects)}
    recorded = {generation for _, generation in await stores.metadata.live_generations(TENANT)}
    assert stored == recorded
    left = []
    for i, facts in enumerate(FACTS):
        cache = await stores.metadata.cache(TENANT, facts.fingerprint.digest)
        if cache is not None:
            left.append(i)
    return left


async def test_field_27_the_store_is_kept_under_its_cap_by_least_recent_use(
    stores: Stores,
) -> None:
    caches = await _built(stores)
    # Used after the others were built, so the second oldest goes first.
    await stores.metadata.touch_context(TENANT, "ctx_0", caches[3].committed_at + 1)
    size_bytes = caches[1].stored_bytes
    cap_bytes = sum(cache.stored_bytes for cache in caches) - 1
    report = await _sweep(stores, cap_bytes)
    assert (report.evicted, report.freed_bytes) == (1, size_bytes)
    assert report.unreferenced == ()
    assert await _left(stores) == [0, 2, 3]
    assert (await _sweep(stores, cap_bytes)).evicted == 0
    assert (await _sweep(stores, 2 * size_bytes + 1000)).evicted == 1
    assert await _left(stores) == [0, 3]
    for i in (0, 3):
        assert_equal_rows((await stores.load(FACTS[i])).rows, ROWS)


async def test_contexts_of_an_evicted_cache_stay_ready_and_are_refunded(stores: Stores) -> None:
    caches = await _built(stores)
    await _sweep(stores, 0)
    assert await _left(stores) == [3]
    page = await stores.metadata.contexts(TENANT, limit=10)
    assert [record.status for record in page.records] == ["ready"] * 4
    assert (await stores.metadata.usage(TENANT)).bytes == caches[3].stored_bytes
    with pytest.raises(NotFound):
        await stores.load(FACTS[0])
    # What is built again is as good as before.
    await stores.metadata.set_building(TENANT, "ctx_0", rebuilding=True)
    await stores.build(ROWS, FACTS[0])
    assert_equal_rows((await stores.load(FACTS[0])).rows, ROWS)
    record = await stores.metadata.context(TENANT, "ctx_0")
    assert record is not None
    assert record.status == "ready"


async def test_no_cap_means_none(stores: Stores) -> None:
    await _built(stores)
    await Sweeper(stores.objects, stores.metadata, stores.leases, 3600).run_once()
    assert await _left(stores) == [0, 1, 2, 3]


async def test_a_cache_that_is_read_built_or_waited_for_is_spared(stores: Stores) -> None:
    await _built(stores)
    await stores.metadata.touch_context(TENANT, "ctx_0", time.time() + 1)
    lease = await stores.lease(FACTS[1])
    await stores.register(FACTS[2], "ctx_9", ratio=0.7)
    async with stores.leases.read_lease(TENANT, FACTS[0].fingerprint.digest):
        assert (await _sweep(stores, 0)).evicted == 1
        assert await _left(stores) == [0, 1, 2]
        assert_equal_rows((await stores.load(FACTS[0])).rows, ROWS)
    await stores.leases.release(lease)
    assert (await _sweep(stores, 0)).evicted == 1
    assert await _left(stores) == [0, 2]


async def test_the_cache_used_last_stays_however_small_the_cap(stores: Stores) -> None:
    await _built(stores)
    assert (await _sweep(stores, 0)).evicted == 3
    assert (await _sweep(stores, 0)).evicted == 0
    assert await _left(stores) == [3]


async def test_sweepers_at_one_time_evict_no_more_than_one_would(stores: Stores) -> None:
    caches = await _built(stores)
    stored = await stored_generations(stores.objects)
    cap_bytes = sum(cache.stored_bytes for cache in caches) - 1
    outcomes = await asyncio.gather(
        *(
            evict_to_cap(stores.objects, stores.metadata, stores.leases, stored, cap_bytes)
            for _ in range(4)
        )
    )
    assert sum(outcome.caches for outcome in outcomes) == 1
    assert await _left(stores) == [1, 2, 3]


async def test_nothing_is_evicted_while_the_stores_do_not_belong_together(
    stores: Stores, metadata: Metadata
) -> None:
    await _built(stores)
    before = files_below(stores.root)
    stored = await stored_generations(stores.objects)
    await metadata.bind_store("another")
    with pytest.raises(StoreMismatch):
        await evict_to_cap(stores.objects, metadata, stores.leases, stored, 0)
    assert files_below(stores.root) == before
    assert await _left(stores) == [0, 1, 2, 3]


async def test_a_replaced_generation_is_evicted_as_what_it_is_now(stores: Stores) -> None:
    """The listing is old by the time that anything goes."""
    await _built(stores)
    stored = await stored_generations(stores.objects)
    again = await stores.build(ROWS, FACTS[0])
    evicted = await evict_to_cap(stores.objects, stores.metadata, stores.leases, stored, 0)
    assert evicted.caches == 3
    assert stores.folder(again).is_dir()
    assert_equal_rows((await stores.load(FACTS[0])).rows, ROWS)


async def test_an_empty_store_has_nothing_to_evict(metadata: Metadata, tmp_path: Path) -> None:
    stores = await Stores.open(tmp_path, metadata)
    objects = Objects.open(f"file://{tmp_path}")
    evicted = await evict_to_cap(objects, metadata, stores.leases, {}, 0)
    assert evicted == Evicted(0, 0)
