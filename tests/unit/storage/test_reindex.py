import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage.binding import require_bound
from kvkeep_storage.documents import delete_document, get_mirror, mirror_context
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import ContextRecord
from kvkeep_storage.reindex import ReindexReport, reindex
from kvkeep_storage.sweeper import Sweeper

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores, files_below

pytestmark = pytest.mark.anyio

ROWS = random_rows()
FACTS = facts_for(ROWS)


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path) -> Stores:
    return await Stores.open(tmp_path, metadata)


async def _reindex(stores: Stores) -> ReindexReport:
    return await reindex(stores.objects, stores.metadata)


async def _record(
    stores: Stores, context_id: str = "ctx_01", tenant: str = TENANT
) -> ContextRecord:
    record = await stores.metadata.context(tenant, context_id)
    assert record is not None
    return record


async def _delete(stores: Stores, key: DocumentKey) -> None:
    """What DELETE does: the document goes before the record."""
    await delete_document(stores.objects, key)
    await stores.metadata.delete_context(key.tenant, key.context_id)


async def test_after_a_flush_everything_comes_back_and_nothing_deleted_returns(
    stores: Stores, redis: Redis
) -> None:
    await stores.register(FACTS, name="kept", metadata={"a": "b"})
    deleted = await stores.register(FACTS, "ctx_02")
    cache = await stores.build(ROWS, FACTS)
    before = await _record(stores)
    await _delete(stores, deleted)
    await redis.flushall()
    # Past the grace period the sweeper still deletes nothing.
    for name in files_below(stores.root):
        os.utime(stores.root / name, (1, 1))
    files = files_below(stores.root)
    with pytest.raises(StoreMismatch):
        await Sweeper(stores.objects, stores.metadata, stores.leases, 60).run_once()
    assert files_below(stores.root) == files
    assert await _reindex(stores) == ReindexReport(contexts=1, caches=1, damaged=())
    after = await _record(stores)
    assert replace(after, ready_at=None) == replace(before, ready_at=None)
    assert await stores.metadata.context(TENANT, "ctx_02") is None
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    await require_bound(stores.objects, stores.metadata)
    swept = await Sweeper(stores.objects, stores.metadata, stores.leases, 60).run_once()
    assert swept.orphan_generations == 0
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_contexts_of_every_tenant_come_back_to_their_own(
    stores: Stores, redis: Redis
) -> None:
    await stores.register(FACTS, tenant="one")
    await stores.register(FACTS, tenant="two")
    await redis.flushall()
    assert (await _reindex(stores)).contexts == 2
    assert await stores.metadata.tenants() == ["one", "two"]
    assert (await _record(stores, tenant="two")).tenant == "two"


async def test_what_waited_for_a_build_waits_again(stores: Stores, redis: Redis) -> None:
    await stores.register(FACTS)
    await redis.flushall()
    assert await _reindex(stores) == ReindexReport(1, 0, ())
    assert (await _record(stores)).status == "queued"
    assert await stores.metadata.unfinished() == [(TENANT, "ctx_01")]


async def test_what_failed_stays_failed(stores: Stores, redis: Redis) -> None:
    key = await stores.register(FACTS)
    await stores.metadata.set_building(TENANT, "ctx_01", rebuilding=False)
    await stores.metadata.fail_context(TENANT, "ctx_01", "document_too_long", "why")
    await mirror_context(stores.objects, stores.metadata, key)
    await redis.flushall()
    await _reindex(stores)
    record = await _record(stores)
    assert (record.status, record.error_code) == ("failed", "document_too_long")
    assert await stores.metadata.unfinished() == []


@pytest.mark.parametrize("name", ["kv-02.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
async def test_a_cache_that_is_not_whole_is_built_again(
    stores: Stores, redis: Redis, name: str, damage: str
) -> None:
    await stores.register(FACTS)
    path = stores.folder(await stores.build(ROWS, FACTS)) / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    await redis.flushall()
    assert await _reindex(stores) == ReindexReport(1, 0, ())
    assert (await _record(stores)).status == "queued"
    await stores.build(ROWS, FACTS)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_the_committed_generation_is_preferred_to_leftovers(
    stores: Stores, redis: Redis
) -> None:
    await stores.register(FACTS)
    await stores.build(ROWS, FACTS)
    committed = await stores.build(ROWS, FACTS)
    leftover = stores.root / "caches" / TENANT / committed.cache_id / "half"
    leftover.mkdir()
    (leftover / "kv-00.safetensors").write_bytes(b"half")
    await mirror_context(stores.objects, stores.metadata, DocumentKey(TENANT, "ctx_01"))
    await redis.flushall()
    await _reindex(stores)
    assert await stores.metadata.cache(TENANT, committed.cache_id) == committed


async def test_a_cache_built_too_low_for_its_context_is_not_called_ready(
    stores: Stores, redis: Redis
) -> None:
    low = random_rows(ratios=(0.05, 0.1))
    await stores.register(facts_for(low), "ctx_low")
    await stores.register(FACTS, "ctx_high")
    await stores.build(low, facts_for(low))
    await redis.flushall()
    assert await _reindex(stores) == ReindexReport(2, 1, ())
    assert (await _record(stores, "ctx_low")).status == "ready"
    assert (await _record(stores, "ctx_high")).status == "queued"


@pytest.mark.parametrize(("low_id", "high_id"), [("ctx_01", "ctx_02"), ("ctx_02", "ctx_01")])
async def test_of_two_committed_generations_the_last_comes_back_whoever_is_looked_at_first(
    stores: Stores, redis: Redis, low_id: str, high_id: str
) -> None:
    low = random_rows(ratios=(0.05, 0.1))
    await stores.register(facts_for(low), low_id)
    await stores.build(low, facts_for(low))
    await stores.register(FACTS, high_id)
    # The first is ready already, and its mirror goes on naming the generation it was built with.
    committed = await stores.build(ROWS, FACTS)
    mirrors = [
        await get_mirror(stores.objects, DocumentKey(TENANT, item)) for item in (low_id, high_id)
    ]
    assert mirrors[0].generation != mirrors[1].generation == committed.generation
    await redis.flushall()
    assert await _reindex(stores) == ReindexReport(2, 1, ())
    assert await stores.metadata.cache(TENANT, committed.cache_id) == committed
    for context_id in (low_id, high_id):
        assert (await _record(stores, context_id)).status == "ready"


@pytest.mark.parametrize("is_first", [True, False])
async def test_of_generations_that_no_mirror_names_the_larger_comes_back(
    stores: Stores, redis: Redis, is_first: bool
) -> None:
    key = await stores.register(FACTS)
    mirror = await stores.objects.get(key.mirror)
    low = random_rows(ratios=(0.05, 0.1))
    await stores.register(facts_for(low), "ctx_02")
    await stores.build(low, facts_for(low))
    committed = await stores.build(ROWS, FACTS)
    # Both lie there under names that are looked at in either order.
    for cache in files_below(stores.root, "caches"):
        if cache.endswith("manifest.json") and committed.generation not in cache:
            smaller = (stores.root / cache).parent
            smaller.rename(smaller.with_name("f" * 16 if is_first else "0" * 16))
    await stores.objects.put(key.mirror, mirror)
    await _delete(stores, DocumentKey(TENANT, "ctx_02"))
    await redis.flushall()
    assert await _reindex(stores) == ReindexReport(1, 1, ())
    assert await stores.metadata.cache(TENANT, committed.cache_id) == committed
    assert (await _record(stores)).status == "ready"


async def test_a_context_that_was_built_afresh_is_mirrored_with_what_it_has_now(
    stores: Stores,
) -> None:
    key = await stores.register(FACTS)
    await stores.build(ROWS, FACTS)
    await stores.metadata.rebuild_context(TENANT, "ctx_01")
    fresh = await stores.build(ROWS, FACTS)
    assert (await get_mirror(stores.objects, key)).generation == fresh.generation


async def test_damaged_mirrors_are_named_and_do_not_stop_the_rest(
    stores: Stores, redis: Redis
) -> None:
    await stores.register(FACTS)
    damaged = await stores.register(FACTS, "ctx_02")
    lonely = await stores.register(FACTS, "ctx_03")
    await stores.objects.put(damaged.mirror, b"{}")
    await stores.objects.delete(lonely.mirror)
    await redis.flushall()
    report = await _reindex(stores)
    assert report.contexts == 1
    assert [line.partition(":")[0] for line in sorted(report.damaged)] == [
        "acme/ctx_02",
        "acme/ctx_03",
    ]


async def test_a_mirror_written_after_a_deletion_brings_nothing_back(
    stores: Stores, redis: Redis
) -> None:
    key = await stores.register(FACTS)
    late = await stores.objects.get(key.mirror)
    await _delete(stores, key)
    await stores.objects.put(key.mirror, late)
    await redis.flushall()
    assert (await _reindex(stores)).contexts == 0
    assert await stores.metadata.context(TENANT, "ctx_01") is None


async def test_a_deletion_during_the_reindex_stays_done(stores: Stores, redis: Redis) -> None:
    key = await stores.register(FACTS)
    await redis.flushall()

    class DeletedOnTheWay(Objects):
        async def directories_below(self, prefix: str) -> list[str]:
            # Asked for the generations: the mirror has been read and the record written.
            if prefix.startswith("caches/"):
                await delete_document(stores.objects, key)
            return await super().directories_below(prefix)

    await reindex(DeletedOnTheWay.open(f"file://{stores.root}"), stores.metadata)
    assert await stores.metadata.context(TENANT, "ctx_01") is None


async def test_a_fixed_expiry_stays_and_a_sliding_one_starts_anew(
    stores: Stores, redis: Redis
) -> None:
    await stores.register(
        FACTS,
        expires_at=1_790_000_060.5,
        expires_anchor="created_at",
        expires_seconds=60,
    )
    await stores.register(
        FACTS,
        "ctx_02",
        expires_at=1_790_000_060.5,
        expires_anchor="last_used_at",
        expires_seconds=60,
    )
    await redis.flushall()
    before = time.time()
    await _reindex(stores)
    assert (await _record(stores)).status == "expired"
    sliding = await _record(stores, "ctx_02")
    assert sliding.expires_at is not None
    assert before + 60 <= sliding.expires_at <= time.time() + 60


async def test_a_reindex_beside_living_records_changes_none(stores: Stores) -> None:
    await stores.register(FACTS)
    cache = await stores.build(ROWS, FACTS)
    await stores.metadata.patch_context(TENANT, "ctx_01", name="newer than its mirror")
    before = await _record(stores)
    assert await _reindex(stores) == ReindexReport(0, 0, ())
    assert await _record(stores) == before
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache


async def test_a_redis_of_another_store_is_never_mixed(stores: Stores) -> None:
    await stores.register(FACTS)
    await stores.metadata.bind_store("another")
    with pytest.raises(StoreMismatch):
        await _reindex(stores)
    assert await stores.metadata.store_id() == "another"
