import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage.documents import mirror_context
from kvkeep_storage.errors import Invalid, NotFound, ObjectsUnavailable, StoreMismatch
from kvkeep_storage.generations import release_generation
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import ObjectInfo, Objects
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.sweeper import Sweeper, SweepReport

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores, entries_below, files_below

pytestmark = pytest.mark.anyio

ROWS = random_rows()
FACTS = facts_for(ROWS)
GRACE_SECONDS = 3600
NOTHING = SweepReport(0, 0, 0, 0, ())


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path) -> Stores:
    return await Stores.open(tmp_path, metadata)


async def _sweep(stores: Stores) -> SweepReport:
    sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, GRACE_SECONDS)
    return await sweeper.run_once()


def _age(stores: Stores) -> None:
    """Let the grace period pass for everything that is stored."""
    for name in files_below(stores.root):
        os.utime(stores.root / name, (1, 1))


async def _orphan(stores: Stores) -> CacheRecord:
    """Commit twice: the first generation is an orphan then."""
    await stores.register(FACTS)
    first = await stores.build(ROWS, FACTS)
    await stores.build(ROWS, FACTS)
    return first


async def test_an_idle_store_has_nothing_to_sweep(stores: Stores) -> None:
    await stores.register(FACTS)
    await stores.build(ROWS, FACTS)
    _age(stores)
    before = files_below(stores.root)
    assert await _sweep(stores) == NOTHING
    assert files_below(stores.root) == before


async def test_an_orphan_goes_after_the_grace_period_and_not_before(stores: Stores) -> None:
    orphan = await _orphan(stores)
    assert await _sweep(stores) == NOTHING
    _age(stores)
    report = await _sweep(stores)
    assert report == replace(NOTHING, orphan_generations=1, freed_bytes=orphan.stored_bytes)
    assert not stores.folder(orphan).exists()
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    assert await _sweep(stores) == NOTHING


async def test_one_young_file_keeps_a_generation(stores: Stores) -> None:
    orphan = await _orphan(stores)
    _age(stores)
    os.utime(stores.folder(orphan) / "kv-01.safetensors")
    assert await _sweep(stores) == NOTHING


async def test_a_generation_in_writing_is_kept_while_its_build_lease_lives(
    stores: Stores,
) -> None:
    await stores.register(FACTS)
    lease = await stores.lease(FACTS)
    key = GenerationKey(TENANT, lease.cache_id, "half")
    await stores.objects.put(key.slab(0), b"half")
    _age(stores)
    assert await _sweep(stores) == NOTHING
    await stores.leases.release(lease)
    assert (await _sweep(stores)).orphan_generations == 1
    assert files_below(stores.root, "caches") == []


async def test_an_orphan_that_is_being_read_is_kept(stores: Stores) -> None:
    orphan = await _orphan(stores)
    _age(stores)
    async with stores.leases.read_lease(TENANT, orphan.cache_id):
        assert await _sweep(stores) == NOTHING
    assert (await _sweep(stores)).orphan_generations == 1


async def test_field_24_leftovers_of_crashed_writes_go(stores: Stores) -> None:
    await stores.register(FACTS)
    folder = stores.folder(await stores.build(ROWS, FACTS))
    (folder / ".kvkeep-00.tmp").write_bytes(b"half")
    assert await _sweep(stores) == NOTHING
    _age(stores)
    (folder / ".kvkeep-01.tmp").write_bytes(b"in writing")
    assert await _sweep(stores) == replace(NOTHING, temp_files=1, freed_bytes=4)
    assert (folder / ".kvkeep-01.tmp").exists()


async def test_files_that_are_not_ours_are_left_alone(stores: Stores) -> None:
    for name in ("caches/notes.txt", "caches/acme/.git/x/y", "caches/a b/c/d/e", "other/x"):
        path = stores.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    _age(stores)
    before = files_below(stores.root)
    assert await _sweep(stores) == NOTHING
    assert files_below(stores.root) == before


async def test_an_expired_context_goes_with_its_document_and_its_last_cache(
    stores: Stores, redis: Redis
) -> None:
    await stores.register(FACTS, expires_at=1_790_000_001.0)
    await stores.register(FACTS, "ctx_02")
    cache = await stores.build(ROWS, FACTS)
    assert await _sweep(stores) == replace(NOTHING, expired=1)
    assert await stores.metadata.context(TENANT, "ctx_01") is None
    # The other context still uses the cache.
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    (key,) = [key async for key in redis.scan_iter("*context:ctx_02")]
    await redis.hset(key, "expires_at", "1790000001.0")
    await redis.zadd(f"kvkeep:{{{TENANT}}}:expiry", {"ctx_02": 1_790_000_001.0})
    report = await _sweep(stores)
    assert report == replace(NOTHING, expired=1, unreferenced=((TENANT, cache.cache_id),))
    assert entries_below(stores.root) == ["store.json"]
    with pytest.raises(NotFound):
        await stores.load(FACTS)


async def test_a_mirror_that_is_written_beside_the_sweep_goes_with_its_context(
    stores: Stores,
) -> None:
    key = await stores.register(FACTS, expires_at=1_790_000_001.0)

    class Mirroring(Objects):
        """A verify or a commit mirrors the record, which is still there, in mid-deletion."""

        async def delete(self, name: str) -> None:
            await super().delete(name)
            if name == key.body:
                await mirror_context(self, stores.metadata, key)

    stores.objects = Mirroring.open(f"file://{stores.root}")
    assert (await _sweep(stores)).expired == 1
    assert entries_below(stores.root) == ["store.json"]


class _Stubborn(Objects):
    """Nothing with any of some names in its key can be deleted."""

    names: tuple[str, ...] = ()

    async def delete(self, key: str) -> None:
        if any(name in key for name in self.names):
            raise ObjectsUnavailable("delete", f"{key}: stubborn")
        await super().delete(key)


async def test_what_the_store_fails_at_keeps_nothing_else_from_being_swept(
    stores: Stores,
) -> None:
    orphan = await _orphan(stores)
    for number, name in enumerate(("ctx_02", "ctx_03", "ctx_04")):
        await stores.register(FACTS, name, expires_at=1_790_000_001.0 + number)
    _age(stores)
    stores.objects = _Stubborn.open(f"file://{stores.root}")
    stores.objects.names = ("ctx_03",)
    report = await _sweep(stores)
    assert (report.expired, report.orphan_generations, report.failed) == (2, 1, 1)
    stores.objects.names = ()
    # Its record was left, so that it is found again.
    assert await _sweep(stores) == replace(NOTHING, expired=1)
    assert not stores.folder(orphan).exists()


async def test_a_store_that_fails_at_everything_ends_the_sweep(stores: Stores) -> None:
    for number in range(12):
        await stores.register(FACTS, f"ctx_{number}", expires_at=1_790_000_001.0)
    stores.objects = _Stubborn.open(f"file://{stores.root}")
    stores.objects.names = ("ctx_",)
    with pytest.raises(ObjectsUnavailable, match="stubborn"):
        await _sweep(stores)


async def test_a_context_that_expired_just_now_still_says_so(stores: Stores) -> None:
    await stores.register(FACTS, expires_at=1_790_000_001.0)
    sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, 1e9)
    assert await sweeper.run_once() == NOTHING
    record = await stores.metadata.context(TENANT, "ctx_01")
    assert record is not None
    assert record.status == "expired"


async def test_field_29_an_expiry_entry_that_the_record_does_not_confirm_deletes_nothing(
    stores: Stores, redis: Redis
) -> None:
    await stores.register(FACTS)
    await redis.zadd(f"kvkeep:{{{TENANT}}}:expiry", {"ctx_01": 1.0, "ctx_99": 1.0})
    before = files_below(stores.root)
    assert await _sweep(stores) == NOTHING
    assert files_below(stores.root) == before


async def test_one_damaged_record_does_not_stop_the_sweep(stores: Stores, redis: Redis) -> None:
    await stores.register(FACTS, expires_at=1_790_000_001.0)
    await stores.register(FACTS, "ctx_02", expires_at=1_790_000_002.0)
    (key,) = [key async for key in redis.scan_iter("*context:ctx_01")]
    await redis.hset(key, "ratio", "damaged")
    assert (await _sweep(stores)).expired == 1
    assert await stores.metadata.context(TENANT, "ctx_02") is None


async def test_a_cache_in_use_outlives_its_last_context_until_the_reader_is_done(
    stores: Stores,
) -> None:
    await stores.register(FACTS, expires_at=1_790_000_001.0)
    cache = await stores.build(ROWS, FACTS)
    async with stores.leases.read_lease(TENANT, cache.cache_id):
        assert (await _sweep(stores)).expired == 1
        assert stores.folder(cache).is_dir()
        key = GenerationKey(TENANT, cache.cache_id, cache.generation)
        assert not await release_generation(stores.objects, stores.metadata, stores.leases, key)
    _age(stores)
    assert (await _sweep(stores)).orphan_generations == 1
    assert entries_below(stores.root) == ["store.json"]


@pytest.mark.parametrize("lost", ["flushed", "another store", "lost directory"])
async def test_nothing_is_deleted_unless_both_stores_belong_together(
    stores: Stores, redis: Redis, lost: str
) -> None:
    await _orphan(stores)
    await stores.register(FACTS, "ctx_02", expires_at=1_790_000_001.0)
    _age(stores)
    if lost == "flushed":
        await redis.flushall()
    elif lost == "another store":
        await stores.metadata.bind_store("another")
    else:
        (stores.root / "store.json").unlink()
    before = files_below(stores.root)
    with pytest.raises(StoreMismatch):
        await _sweep(stores)
    assert files_below(stores.root) == before


async def test_a_redis_flushed_in_mid_sweep_makes_no_orphans(stores: Stores, redis: Redis) -> None:
    class FlushedOnTheWay(Objects):
        async def objects_below(self, prefix: str) -> list[ObjectInfo]:
            await redis.flushall()
            return await super().objects_below(prefix)

    await _orphan(stores)
    _age(stores)
    before = files_below(stores.root)
    stores.objects = FlushedOnTheWay.open(f"file://{stores.root}")
    with pytest.raises(StoreMismatch):
        await _sweep(stores)
    assert files_below(stores.root) == before


async def test_a_cache_committed_in_mid_sweep_is_kept(stores: Stores, redis: Redis) -> None:
    """The record is read last: what was an orphan when it was listed may be live by now."""
    orphan = await _orphan(stores)
    _age(stores)

    class CommittedOnTheWay(Objects):
        async def objects_below(self, prefix: str) -> list[ObjectInfo]:
            (key,) = [key async for key in redis.scan_iter(f"*:cache:{orphan.cache_id}")]
            generation = prefix.rpartition("/")[2]
            await redis.hset(key, "generation", generation)
            return await super().objects_below(prefix)

    before = files_below(stores.root)
    stores.objects = CommittedOnTheWay.open(f"file://{stores.root}")
    assert await _sweep(stores) == NOTHING
    assert files_below(stores.root) == before


async def test_two_sweepers_at_once_leave_the_same_as_one(stores: Stores) -> None:
    await _orphan(stores)
    await stores.register(FACTS, "ctx_02", expires_at=1_790_000_001.0)
    _age(stores)
    await asyncio.gather(*(_sweep(stores) for _ in range(3)))
    assert await _sweep(stores) == NOTHING
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_a_negative_grace_is_refused(stores: Stores) -> None:
    with pytest.raises(Invalid, match="grace_seconds"):
        Sweeper(stores.objects, stores.metadata, stores.leases, -1)
