import os
from collections.abc import Sequence

import pytest

from kvkeep_storage import range_plan
from kvkeep_storage.errors import Corrupt, ObjectsUnavailable
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.retries import ATTEMPTS
from kvkeep_storage.sources import ObjectSource, Origin

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("retries_do_not_wait")]

ROWS = random_rows()
FACTS = facts_for(ROWS)


async def _committed(stores: Stores) -> CacheRecord:
    await stores.register(FACTS)
    return await stores.build(ROWS, FACTS)


class _Flaky(ObjectSource):
    """Every read is unavailable for the first times."""

    def __init__(self, objects: Objects, failures: int) -> None:
        super().__init__(objects)
        self.failures = failures
        self.seen: dict[tuple[str, int], int] = {}

    def _count(self, key: str, start: int) -> None:
        self.seen[key, start] = self.seen.get((key, start), 0) + 1
        if self.seen[key, start] <= self.failures:
            raise ObjectsUnavailable("read", "flaky")

    async def get(self, key: str) -> bytes:
        self._count(key, 0)
        return await super().get(key)

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        self._count(key, start)
        await super().read_ranges(key, start, into, on_filled)


async def test_trouble_that_passes_is_not_seen_by_the_caller(stores: Stores) -> None:
    await _committed(stores)
    flaky = _Flaky(stores.objects, 2)
    assert_equal_rows((await stores.load(FACTS, source=flaky)).rows, ROWS)
    # The manifest, and the header and the rest of three slabs.
    assert list(flaky.seen.values()) == [3] * 7


async def test_a_store_that_stays_away_is_unavailable_after_bounded_tries(stores: Stores) -> None:
    cache = await _committed(stores)
    flaky = _Flaky(stores.objects, 1000)
    with pytest.raises(ObjectsUnavailable):
        await stores.load(FACTS, source=flaky)
    assert list(flaky.seen.values()) == [ATTEMPTS]
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


class _Nearer(ObjectSource):
    """A nearer copy, of which chosen reads give wrong bytes until it is forgotten.

    ``lasting`` is how often it is filled with the same wrong bytes again, ``tells`` whether it
    says what it has filled.
    """

    def __init__(
        self, objects: Objects, wrong: str, *, lasting: int = 0, tells: bool = True
    ) -> None:
        super().__init__(objects)
        self.tells = tells
        self.wrong = wrong
        self.lasting = lasting
        self.forgotten: list[str] = []
        self.num_reads = 0

    async def get(self, key: str) -> bytes:
        content = await super().get(key)
        return content[:-1] if self._is_wrong(key, 0) else content

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        self.num_reads += 1
        await super().read_ranges(key, start, into)
        if self._is_wrong(key, start):
            self.spoil(into)
        # Whoever changes bytes tells of them afterwards, or never.
        if self.tells and on_filled is not None:
            on_filled(start, into)

    def spoil(self, into: Sequence[memoryview]) -> None:
        into[-1][0] ^= 1

    async def forget(self, prefix: str) -> None:
        self.forgotten.append(prefix)

    async def origin(self, prefix: str) -> Origin:
        return "disk"

    def _is_wrong(self, key: str, start: int) -> bool:
        what = "manifest" if key.endswith("json") else "header" if start == 0 else "rows"
        return what == self.wrong and len(self.forgotten) <= self.lasting


async def test_a_load_says_where_its_bytes_came_from(stores: Stores) -> None:
    await _committed(stores)
    assert (await stores.load(FACTS)).source == "store"
    nearer = _Nearer(stores.objects, "nothing")
    assert (await stores.load(FACTS, source=nearer)).source == "disk"
    assert nearer.forgotten == []


@pytest.mark.parametrize("wrong", ["manifest", "header", "rows"])
@pytest.mark.parametrize("tells", [True, False], ids=["told", "untold"])
async def test_a_wrong_nearer_copy_is_forgotten_and_proves_nothing(
    stores: Stores, wrong: str, tells: bool
) -> None:
    cache = await _committed(stores)
    nearer = _Nearer(stores.objects, wrong, tells=tells)
    loaded = await stores.load(FACTS, source=nearer)
    assert_equal_rows(loaded.rows, ROWS)
    assert loaded.source == "store"
    assert set(nearer.forgotten) == {f"caches/{TENANT}/{cache.cache_id}/{cache.generation}"}


@pytest.mark.parametrize("wrong", ["manifest", "header", "rows"])
@pytest.mark.parametrize("tells", [True, False], ids=["told", "untold"])
async def test_the_same_wrong_bytes_after_forgetting_are_proven_wrong(
    stores: Stores, wrong: str, tells: bool
) -> None:
    cache = await _committed(stores)
    nearer = _Nearer(stores.objects, wrong, lasting=1000, tells=tells)
    with pytest.raises(Corrupt) as corrupt:
        await stores.load(FACTS, source=nearer)
    assert corrupt.value.generation == cache.generation
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache


async def test_only_what_was_wrong_is_read_again(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_plan, "RANGE_BYTES", 64)
    await _committed(stores)
    whole = _Nearer(stores.objects, "nothing")
    await stores.load(FACTS, source=whole)

    class OneWrong(_Nearer):
        def spoil(self, into: Sequence[memoryview]) -> None:
            self.wrong = "nothing"
            super().spoil(into)

    once = OneWrong(stores.objects, "rows")
    assert_equal_rows((await stores.load(FACTS, source=once)).rows, ROWS)
    assert len(once.forgotten) == 1
    assert whole.num_reads < once.num_reads < whole.num_reads * 1.5


async def test_bytes_that_are_wrong_in_another_way_each_time_prove_nothing(
    stores: Stores,
) -> None:
    cache = await _committed(stores)

    class Noisy(_Nearer):
        def spoil(self, into: Sequence[memoryview]) -> None:
            into[-1][:] = os.urandom(len(into[-1]))

    noisy = Noisy(stores.objects, "rows", lasting=1000)
    with pytest.raises(ObjectsUnavailable, match="other bytes at every try"):
        await stores.load(FACTS, source=noisy)
    assert await stores.metadata.cache(TENANT, cache.cache_id) == cache


async def test_a_slab_cut_short_behind_its_size_check_is_proven_wrong(stores: Stores) -> None:
    cache = await _committed(stores)
    path = stores.folder(cache) / "kv-01.safetensors"
    size_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])

    class OldSize(ObjectSource):
        async def size(self, key: str) -> int:
            return size_bytes if key.endswith(path.name) else await super().size(key)

    with pytest.raises(Corrupt, match="ends too early") as corrupt:
        await stores.load(FACTS, source=OldSize(stores.objects))
    assert corrupt.value.generation == cache.generation


class _Late(ObjectSource):
    """Some reads are given up at their deadline, and write their bytes when told to."""

    def __init__(self, objects: Objects, times: int) -> None:
        super().__init__(objects)
        self.times = times
        self.late: list[memoryview] = []

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        if start and self.times:
            self.times -= 1
            self.late.extend(into)
            raise ObjectsUnavailable("read", "no answer", abandoned=True)
        await super().read_ranges(key, start, into, on_filled)

    def write(self) -> None:
        for view in self.late:
            view[:] = os.urandom(len(view))


async def test_a_read_that_missed_its_deadline_cannot_write_into_the_answer(
    stores: Stores,
) -> None:
    await _committed(stores)
    late = _Late(stores.objects, ATTEMPTS - 1)
    loaded = await stores.load(FACTS, source=late)
    late.write()
    assert_equal_rows(loaded.rows, ROWS)


async def test_reads_that_always_miss_their_deadline_are_unavailable(stores: Stores) -> None:
    await _committed(stores)
    late = _Late(stores.objects, 1000)
    with pytest.raises(ObjectsUnavailable, match="no answer"):
        await stores.load(FACTS, source=late)
    # Three slabs, in every attempt.
    assert 1000 - late.times <= 3 * ATTEMPTS
