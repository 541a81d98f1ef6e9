"""The disk tier answers as the store does, and asks the store as little as it can."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep_storage import disk_fill
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.errors import Corrupt, Invalid, NotFound
from kvkeep_storage.load import load
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects

from ...support.caches import assert_equal_rows, facts_for, prefix_of, random_rows
from ...support.disk_tiers import (
    BUDGET_BYTES,
    KEY,
    CountedObjects,
    OpenTier,
    begun,
    content_of,
    copies,
    read,
    settled,
)
from ...support.stores import TENANT, Stores

pytestmark = pytest.mark.anyio

ROWS = random_rows(remainder=True)
FACTS = facts_for(ROWS)
CHUNK_BYTES = 1000
CONTENT = content_of(4 * CHUNK_BYTES + 304)
SLAB = KEY.slab(0)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_fill, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
async def objects(tmp_path: Path) -> CountedObjects:
    """A store with an identity and one slab."""
    found = CountedObjects.at(tmp_path / "objects")
    await found.store_id()
    await found.put(SLAB, CONTENT)
    return found


@pytest.fixture
def tier(objects: CountedObjects, open_tier: OpenTier) -> DiskTier:
    return open_tier(objects)


@pytest.mark.parametrize(
    ("start", "size_bytes"),
    [(0, 4304), (0, 1), (999, 2), (1000, 1000), (1500, 2300), (4303, 1), (4304, 0), (0, 0)],
)
async def test_every_range_is_the_stores_first_and_later_from_the_disk(
    tier: DiskTier, objects: CountedObjects, start: int, size_bytes: int
) -> None:
    expected = CONTENT[start : start + size_bytes]
    assert await read(tier, SLAB, start, size_bytes) == expected
    await settled(tier)
    objects.reads.clear()
    assert await read(tier, SLAB, start, size_bytes) == expected
    assert await tier.size(SLAB) == len(CONTENT)
    assert not objects.reads


async def test_many_readers_of_one_slab_fetch_it_once(
    tier: DiskTier, objects: CountedObjects
) -> None:
    found = await asyncio.gather(*(read(tier, SLAB, 7 * n, 900) for n in range(50)))
    assert found == [CONTENT[7 * n : 7 * n + 900] for n in range(50)]
    await settled(tier)
    assert objects.of_slabs() == 5


async def test_bytes_are_handed_out_as_they_arrive(tier: DiskTier, objects: CountedObjects) -> None:
    objects.free_bytes = 2 * CHUNK_BYTES
    objects.gate.clear()
    async with asyncio.timeout(60):
        assert await read(tier, SLAB, 0, 2000) == CONTENT[:2000]
    later = asyncio.create_task(read(tier, SLAB, 0, 2001))
    await asyncio.sleep(0.05)
    assert not later.done()
    objects.gate.set()
    assert await later == CONTENT[:2001]


async def test_a_reader_that_gives_up_takes_the_slab_from_nobody(
    tier: DiskTier, objects: CountedObjects
) -> None:
    objects.gate.clear()
    first, second = (asyncio.create_task(read(tier, SLAB, 0, 4304)) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    objects.gate.set()
    assert await second == CONTENT
    await settled(tier)
    assert objects.of_slabs() == 5


async def test_another_process_and_a_later_one_read_what_the_first_kept(
    tier: DiskTier, objects: CountedObjects, open_tier: OpenTier
) -> None:
    await read(tier, SLAB, 0, 10)
    await settled(tier)
    await tier.close()
    objects.reads.clear()
    assert await read(open_tier(objects), SLAB, 0, 4304) == CONTENT
    assert objects.of_slabs() == 0


async def test_only_objects_of_generations_are_kept(
    tier: DiskTier, objects: CountedObjects, tmp_path: Path
) -> None:
    names = [
        "documents/acme/ctx_01/document.json",
        "caches/acme/c/document.json",
        "caches/acme/c/g/deeper/kv-00.safetensors",
        "caches/acme/.hidden/g/kv-00.safetensors",
        "caches/acme/c/g/.kvkeep-00.tmp",
        "store.json",
    ]
    for name in names:
        if name != "store.json":
            await objects.put(name, b"mine")
        assert await tier.get(name) == await objects.get(name)
        assert len(await read(tier, name, 0, 4)) == 4
        assert await tier.size(name) == await objects.size(name)
    await settled(tier)
    assert copies(tmp_path / "disk") == []


async def test_what_the_store_does_not_have_is_missing_here_too(
    tier: DiskTier, objects: CountedObjects, tmp_path: Path
) -> None:
    for missing in (tier.get(KEY.manifest), tier.size(KEY.slab(1)), read(tier, KEY.slab(1), 0, 1)):
        with pytest.raises(NotFound):
            await missing
    with pytest.raises(Corrupt):
        await read(tier, SLAB, 4000, 305)
    await settled(tier)
    assert [path.name for path in copies(tmp_path / "disk")] == ["kv-00.safetensors"]


async def test_a_store_without_identity_is_read_and_not_kept(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    fresh = CountedObjects.at(tmp_path / "fresh")
    await fresh.put(SLAB, CONTENT)
    tier = open_tier(fresh)
    assert await read(tier, SLAB, 0, 4304) == CONTENT
    assert await tier.origin(KEY.prefix) == "store"
    assert await tier.generations() == []
    assert copies(tmp_path / "disk") == []
    # It is given one at the first registration at the latest.
    await fresh.store_id()
    await read(tier, SLAB, 0, 4304)
    assert len(copies(tmp_path / "disk")) == 1


async def test_two_stores_in_one_directory_never_see_each_other(
    tier: DiskTier, open_tier: OpenTier, tmp_path: Path
) -> None:
    await read(tier, SLAB, 0, 10)
    await settled(tier)
    other = CountedObjects.at(tmp_path / "other")
    await other.store_id()
    await other.put(SLAB, CONTENT[::-1])
    theirs = open_tier(other)
    assert await theirs.generations() == []
    assert await read(theirs, SLAB, 0, 4304) == CONTENT[::-1]
    assert await read(tier, SLAB, 0, 4304) == CONTENT
    await theirs.drop(KEY)
    # What was on its way when it was dropped goes when it has arrived.
    await settled(theirs)
    assert len(copies(tmp_path / "disk")) == 1


async def test_forgotten_bytes_come_from_the_store_next_and_are_not_kept_for_a_while(
    tier: DiskTier, objects: CountedObjects, tmp_path: Path
) -> None:
    await read(tier, SLAB, 0, 10)
    await settled(tier)
    assert await tier.origin(KEY.prefix) == "disk"
    await tier.forget(KEY.prefix)
    assert copies(tmp_path / "disk") == []
    assert await tier.origin(KEY.prefix) == "store"
    for _ in range(2):
        objects.reads.clear()
        assert await read(tier, SLAB, 1000, 10) == CONTENT[1000:1010]
        assert objects.reads == {SLAB: 1}
    assert copies(tmp_path / "disk") == []
    # Others are not suspected.
    await objects.put(f"{KEY.prefix}2/kv-00.safetensors", CONTENT)
    await read(tier, f"{KEY.prefix}2/kv-00.safetensors", 0, 1)
    await settled(tier)
    assert len(copies(tmp_path / "disk")) == 1
    assert tier.stats().forgotten == 1


@pytest.mark.parametrize("at", ["in the middle", "at the end"])
async def test_what_is_dropped_on_its_way_is_read_to_the_end_and_not_kept(
    tier: DiskTier,
    objects: CountedObjects,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    objects.gate.clear()
    reading = asyncio.create_task(read(tier, SLAB, 0, 4304))
    await begun(tmp_path / "disk")
    if at == "in the middle":
        await tier.drop(KEY)
    else:
        finish = disk_fill.DiskFiles.finish

        def finish_and_drop(self: disk_fill.DiskFiles, *args: object) -> None:
            finish(self, *args)  # type: ignore[arg-type]  # passed on as it came
            asyncio.run_coroutine_threadsafe(tier.drop(KEY), loop).result(30)
            # As a drop that looked just before the copy got its name.
            path = tmp_path / "disk" / f"store-{store_id}" / SLAB
            path.parent.mkdir(parents=True)
            path.write_bytes(CONTENT)

        loop = asyncio.get_running_loop()
        store_id = await objects.store_id()
        monkeypatch.setattr(disk_fill.DiskFiles, "finish", finish_and_drop)
    objects.gate.set()
    assert await reading == CONTENT
    await settled(tier)
    assert copies(tmp_path / "disk") == []


async def test_the_counts_tell_where_bytes_came_from(
    tier: DiskTier, objects: CountedObjects
) -> None:
    await objects.put(KEY.manifest, b"{}")
    await tier.get(KEY.manifest)
    await read(tier, SLAB, 0, 4000)
    await settled(tier)
    first = tier.stats()
    assert (first.hits, first.misses, first.entries, first.size_bytes) == (0, 2, 2, 4306)
    assert first.store_bytes == 4304
    assert first.store_seconds > 0
    await tier.get(KEY.manifest)
    await read(tier, SLAB, 0, 4000)
    second = tier.stats()
    assert (second.hits, second.misses, second.store_bytes) == (2, 2, 4304)
    assert second.disk_bytes == first.disk_bytes + 4000
    assert second.disk_seconds > 0
    assert (second.evictions, second.errors, second.forgotten, second.filling) == (0, 0, 0, 0)
    assert second.budget_bytes == BUDGET_BYTES


def test_a_place_that_cannot_be_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    objects = Objects.open(f"file://{tmp_path}/objects")
    with pytest.raises(Invalid, match=r"disk cache: .*file"):
        DiskTier.open(objects, tmp_path / "file" / "below", 1)
    with pytest.raises(Invalid, match="budget_bytes"):
        DiskTier.open(objects, tmp_path / "disk", -1)


# --- below a real load -------------------------------------------------------------------------


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path) -> Stores:
    opened = await Stores.open(tmp_path / "objects", metadata)
    await opened.register(FACTS)
    await opened.build(ROWS, FACTS)
    return opened


@pytest.fixture
def counted(stores: Stores) -> Iterator[CountedObjects]:
    stores.objects = objects = CountedObjects.at(stores.root)
    yield objects
    # Nothing that was damaged here led to a quarantine.
    assert len(list(stores.root.glob("caches/*/*/*/manifest.json"))) == 1


async def _load(stores: Stores, tier: DiskTier, ratio: float | None = None) -> str:
    loaded = await load(
        tier,
        stores.objects,
        stores.metadata,
        stores.leases,
        TENANT,
        FACTS.fingerprint.digest,
        expected=FACTS.fingerprint.model_identity,
        ratio=ratio,
    )
    bands = len(ROWS.ratios) if ratio is None else ROWS.ratios.index(ratio) + 1
    assert_equal_rows(loaded.rows, prefix_of(ROWS, bands))
    await settled(tier)
    return loaded.source


async def test_field_20_what_was_kept_is_read_back_without_asking_the_store(
    stores: Stores, counted: CountedObjects, open_tier: OpenTier
) -> None:
    assert await _load(stores, open_tier(counted)) == "store"
    counted.reads.clear()
    later = open_tier(counted)
    assert await _load(stores, later) == "disk"
    assert counted.of_slabs() == 0
    assert later.stats().hits > 0
    assert later.stats().misses == 0


async def test_in_front_of_a_real_server_a_second_load_asks_it_for_nothing(
    stores: Stores, open_tier: OpenTier, s3_url: str
) -> None:
    remote = CountedObjects.over(s3_url)
    for item in await stores.objects.objects_below(""):
        await remote.put(item.key, await stores.objects.get(item.key))
    stores.objects = remote
    assert remote.is_remote
    assert await _load(stores, open_tier(remote)) == "store"
    assert remote.of_slabs() > 0
    remote.reads.clear()
    assert await _load(stores, open_tier(remote)) == "disk"
    assert remote.of_slabs() == 0


async def test_a_load_of_low_bands_keeps_only_those(
    stores: Stores, counted: CountedObjects, open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = open_tier(counted)
    await _load(stores, tier, 0.1)
    assert [path.name for path in copies(tmp_path / "disk")] == [
        "kv-00.safetensors",
        "kv-01.safetensors",
        "manifest.json",
    ]
    counted.reads.clear()
    await _load(stores, tier, 0.05)
    assert counted.of_slabs() == 0
    await _load(stores, tier, 0.3)
    fetched = {key.rpartition("/")[2] for key in counted.reads if key.startswith("caches/")}
    assert fetched == {"kv-02.safetensors"}


@pytest.mark.parametrize(
    "damage", ["a flipped bit", "cut short", "empty", "too long", "zeros", "swapped"]
)
async def test_a_damaged_copy_costs_one_look_and_never_the_generation(
    stores: Stores,
    counted: CountedObjects,
    open_tier: OpenTier,
    tmp_path: Path,
    damage: str,
) -> None:
    await _load(stores, open_tier(counted))
    files = copies(tmp_path / "disk")
    assert len(files) == 4
    for path in files:
        _damage(path, files, damage)
        tier = open_tier(counted)
        await _load(stores, tier)
        assert tier.stats().forgotten == 1
        await _load(stores, open_tier(counted))
        files = copies(tmp_path / "disk")
        assert len(files) == 4


def _damage(path: Path, files: list[Path], damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        content[len(content) // 2] ^= 4
    elif damage == "cut short":
        del content[-3:]
    elif damage == "empty":
        content.clear()
    elif damage == "too long":
        content += b"\0"
    elif damage == "zeros":
        content = bytearray(len(content))
    else:
        content[:] = next(other for other in files if other != path).read_bytes()
    path.write_bytes(content)
