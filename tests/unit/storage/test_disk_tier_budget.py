"""The bytes of the disk tier stay in their budget, in all processes together, whatever crashed."""

import asyncio
import fcntl
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvkeep_storage import disk_budget, disk_fill
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.load import load
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.pieces import Filled

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.disk_tiers import (
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

SIZE_BYTES = 1600
LONG_AGO = 1_000_000


def slab(number: int) -> str:
    return GenerationKey("acme", f"cache{number}", "gen").slab(0)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_fill, "CHUNK_BYTES", 500)


@pytest.fixture
def _equal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fetch seems to take no time at all."""
    monkeypatch.setattr(disk_fill, "perf_counter", float)
    monkeypatch.setattr(disk_budget, "_ESTIMATED_SECONDS", 0.0)
    monkeypatch.setattr(disk_budget, "_ESTIMATED_BYTES_PER_SECOND", float("inf"))


@pytest.fixture
async def objects(tmp_path: Path) -> CountedObjects:
    """A store of twenty slabs of equal size."""
    found = CountedObjects.at(tmp_path / "objects")
    await found.store_id()
    for number in range(20):
        await found.put(slab(number), content_of(SIZE_BYTES, number))
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


async def fetch(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert await read(tier, slab(number), 0, SIZE_BYTES) == content_of(SIZE_BYTES, number)
        await settled(tier)


def kept(disk: Path) -> set[int]:
    return {int(path.parent.parent.name.removeprefix("cache")) for path in copies(disk)}


def age(disk: Path, *order: int) -> None:
    """Nothing is in use any more; what was used last stands last."""
    for path in copies(disk):
        number = int(path.parent.parent.name.removeprefix("cache"))
        used_at = LONG_AGO + (order.index(number) if number in order else 0)
        os.utime(path, (used_at, used_at))


@pytest.mark.usefixtures("_equal_costs")
async def test_the_least_recently_used_go_first_whichever_process_used_them(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    ours, theirs = (open_tier(objects, 4 * SIZE_BYTES) for _ in range(2))
    await fetch(ours, 0, 1)
    await fetch(theirs, 2, 3)
    assert kept(disk) == {0, 1, 2, 3}
    age(disk, 1, 2, 3, 0)
    await fetch(ours, 4)
    assert kept(disk) == {2, 3, 0, 4}
    # A use by the other process counts like one of our own.
    age(disk, 2, 3, 0, 4)
    await fetch(theirs, 2)
    await fetch(ours, 5, 6)
    assert kept(disk) == {2, 4, 5, 6}
    assert ours.stats().evictions == 3
    assert theirs.stats().evictions == 0


async def test_field_27_the_directory_never_grows_beyond_its_budget(
    objects: CountedObjects, open_tier: OpenTier, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_budget, "_IN_USE_SECONDS", -1.0)
    budget_bytes = 5 * SIZE_BYTES + 100
    tiers = [open_tier(objects, budget_bytes) for _ in range(3)]
    chosen = random.Random(27)
    largest_bytes = 0

    async def use(tier: DiskTier) -> None:
        nonlocal largest_bytes
        for _ in range(40):
            number = chosen.randrange(20)
            found = await read(tier, slab(number), 0, SIZE_BYTES)
            assert found == content_of(SIZE_BYTES, number)
            largest_bytes = max(largest_bytes, size_of(disk))

    await asyncio.gather(*(use(tier) for tier in tiers))
    for tier in tiers:
        await settled(tier)
    assert largest_bytes <= budget_bytes
    assert size_of(disk) > 3 * SIZE_BYTES
    assert sum(tier.stats().evictions for tier in tiers) > 10
    assert sum(tier.stats().errors for tier in tiers) == 0


def size_of(disk: Path) -> int:
    """Bytes of all files, in the making or whole, while nothing can come or go."""
    with (disk / "usage").open() as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in copies(disk))


async def test_what_is_dear_to_bring_back_stays(
    objects: CountedObjects, open_tier: OpenTier, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(disk_fill, "perf_counter", lambda: now)
    tier = open_tier(objects, 3 * SIZE_BYTES)
    objects.gate.clear()
    dear = asyncio.create_task(read(tier, slab(0), 0, SIZE_BYTES))
    await begun(disk)
    now = 10.0
    objects.gate.set()
    await dear
    await fetch(tier, 1, 2)
    age(disk, 0, 1, 2)
    # Not used for the longest time, and yet not the first to go.
    await fetch(tier, 3)
    assert 0 in kept(disk)
    assert len(kept(disk)) == 3


async def test_what_is_larger_than_the_budget_is_read_and_not_kept(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    tier = open_tier(objects, SIZE_BYTES - 1)
    for _ in range(3):
        await fetch(tier, 0)
    assert copies(disk) == []
    # Asked for its size once, and from then on read as if there were no tier.
    del objects.reads["store.json"]
    assert objects.reads == {slab(0): 3, f"size of {slab(0)}": 1}


@pytest.mark.usefixtures("_equal_costs")
async def test_what_a_load_reads_now_is_not_evicted_and_nothing_fails(
    objects: CountedObjects, open_tier: OpenTier, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_budget, "_IN_USE_SECONDS", 3600.0)
    ours, theirs = (open_tier(objects, 2 * SIZE_BYTES) for _ in range(2))
    await fetch(ours, 0, 1)
    age(disk, 0, 1)
    await fetch(ours, 0)
    await fetch(theirs, 2)
    assert kept(disk) == {0, 2}
    # Both are in use.
    await fetch(ours, 3)
    assert kept(disk) == {0, 2}


@pytest.mark.usefixtures("_equal_costs")
@pytest.mark.parametrize("said", ["", "nonsense", f"{10**9:020d}\n", None])
async def test_what_the_books_say_wrongly_is_found_out(
    objects: CountedObjects, open_tier: OpenTier, disk: Path, said: str | None
) -> None:
    tier = open_tier(objects, 3 * SIZE_BYTES)
    await fetch(tier, 0, 1)
    age(disk, 0, 1)
    if said is None:
        (disk / "usage").unlink()
    else:
        (disk / "usage").write_text(said)
    await fetch(tier, 2)
    assert kept(disk) == {0, 1, 2}
    age(disk, 0, 1, 2)
    await fetch(tier, 3)
    assert kept(disk) == {1, 2, 3}


@pytest.mark.usefixtures("_equal_costs")
async def test_field_29_files_that_vanish_make_room_and_are_fetched_again(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    """Existence is never taken from memory: an entry that is gone is a miss, not an error."""
    tier = open_tier(objects, 2 * SIZE_BYTES)
    await fetch(tier, 0, 1)
    for path in copies(disk):
        path.unlink()
    await fetch(tier, 2, 3)
    assert kept(disk) == {2, 3}
    later = open_tier(objects, 3 * SIZE_BYTES)
    await fetch(later, 0)
    assert kept(disk) == {0, 2, 3}
    assert tier.stats().errors == later.stats().errors == 0


async def test_what_a_crash_left_half_filled_goes_at_the_start_and_when_there_is_no_room(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    tier = open_tier(objects, 2 * SIZE_BYTES)
    await fetch(tier, 0)
    [whole] = copies(disk)
    left = whole.parent.parent.parent / "cache9" / "gen" / "kv-00.safetensors.part"
    for make_it_go in ("a start", "a reclaim", "no room"):
        left.parent.mkdir(parents=True)
        left.write_bytes(bytes(SIZE_BYTES))
        if make_it_go == "a start":
            open_tier(objects, 2 * SIZE_BYTES)
        elif make_it_go == "a reclaim":
            await tier.reclaim()
        else:
            (disk / "usage").write_text(f"{2 * SIZE_BYTES:020d}\n")
            await fetch(tier, 1)
        assert not left.parent.parent.exists() or make_it_go == "no room"
        assert not left.exists()
    assert kept(disk) == {0, 1}


async def test_a_part_somebody_still_fills_is_left_alone(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    tier, other = (open_tier(objects, 2 * SIZE_BYTES) for _ in range(2))
    objects.gate.clear()
    reading = asyncio.create_task(read(tier, slab(0), 0, SIZE_BYTES))
    await begun(disk)
    await other.reclaim()
    await other.drop(GenerationKey("acme", "cache0", "gen"))
    assert [path.name for path in copies(disk)] == ["kv-00.safetensors.part"]
    objects.gate.set()
    await reading
    await settled(tier)
    assert [path.name for path in copies(disk)] == ["kv-00.safetensors"]


async def test_copies_of_a_store_that_nobody_uses_any_more_go_and_files_of_others_stay(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    tier = open_tier(objects)
    await fetch(tier, 0)
    age(disk)
    foreign = disk / "store-of-old" / slab(1)
    used = disk / "store-of-a-neighbour" / slab(1)
    mine = [disk / "notes.txt", disk / "mine" / "kv-00.safetensors"]
    for path in (foreign, used, *mine):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    for path in (foreign, *mine):
        os.utime(path, (LONG_AGO, LONG_AGO))
    await tier.reclaim()
    assert not (disk / "store-of-old").exists()
    assert used.exists()
    assert all(path.exists() for path in mine)
    assert len(copies(disk)) == 2
    assert (tier.stats().entries, tier.stats().size_bytes) == (2, SIZE_BYTES + 1)


async def test_a_load_goes_on_when_its_slabs_are_evicted_between_two_reads(
    metadata: Metadata, tmp_path: Path, open_tier: OpenTier
) -> None:
    rows = random_rows()
    facts = facts_for(rows)
    stores = await Stores.open(tmp_path / "objects", metadata)
    await stores.register(facts)
    await stores.build(rows, facts)

    class Evicted(CountedObjects):
        async def read_ranges(
            self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
        ) -> None:
            await super().read_ranges(key, start, into, on_filled)
            for path in copies(tmp_path / "disk"):
                path.unlink()

    stores.objects = objects = Evicted.at(stores.root)
    for _ in range(3):
        loaded = await load(
            open_tier(objects),
            objects,
            metadata,
            stores.leases,
            TENANT,
            facts.fingerprint.digest,
            expected=facts.fingerprint.model_identity,
            ratio=None,
        )
        assert_equal_rows(loaded.rows, rows)
