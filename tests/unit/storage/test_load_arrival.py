"""What an observer of a load is told, and when."""

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence

import pytest

from kvkeep_storage import range_plan
from kvkeep_storage.arrival import ArrivingRows
from kvkeep_storage.artifact import CacheRows
from kvkeep_storage.errors import Corrupt, Invalid, NotFound, ObjectsUnavailable
from kvkeep_storage.layer_parts import layer_parts
from kvkeep_storage.manifest import Manifest
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.retries import ATTEMPTS
from kvkeep_storage.sources import ObjectSource

from ...support.caches import RATIOS, assert_equal_rows, facts_for, random_rows
from ...support.stores import Stores

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("retries_do_not_wait")]

NUM_LAYERS = 6
ROWS = random_rows(num_layers=NUM_LAYERS, rows_max=9, remainder=True)
FACTS = facts_for(ROWS)
FIRST = 0.1
FIRST_BANDS = RATIOS.index(FIRST) + 1
HIGH_SLAB = "kv-02.safetensors"


@pytest.fixture(autouse=True)
def _many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_plan, "RANGE_BYTES", 128)


async def _committed(stores: Stores) -> CacheRecord:
    await stores.register(FACTS)
    return await stores.build(ROWS, FACTS)


def _layer_bytes(rows: CacheRows | ArrivingRows, layer: int, bands: int) -> list[bytes]:
    """The bytes of a layer in its first bands, without looking at any other."""
    return [
        b"".join(view for views in part.tensors[1:] for view in views)
        for part in layer_parts(rows.counts, rows.layers, range(bands))
        if part.layer == layer
    ]


class Watch:
    """Looks at each layer when it is announced, and again when asked."""

    def __init__(self, expected: CacheRows, bands: int) -> None:
        self.expected = expected
        self.bands = bands
        self.rows: ArrivingRows | None = None
        self.layers: list[int] = []
        self.first_at: int | None = None
        self.then: Callable[[str], None] = lambda _: None

    def on_room(self, rows: ArrivingRows, manifest: Manifest, generation: str) -> None:
        assert self.rows is None
        assert manifest.fingerprint == FACTS.fingerprint
        self.rows = rows

    def on_layer(self, index: int) -> None:
        self.layers.append(index)
        self.check(index)
        self.then("layer")

    def on_first(self) -> None:
        assert self.first_at is None
        self.first_at = len(self.layers)
        self.then("first")

    def check(self, *layers: int) -> None:
        """Everything that was announced is there, bit for bit."""
        assert self.rows is not None
        for index in layers or self.layers:
            found = _layer_bytes(self.rows, index, self.bands)
            assert found == _layer_bytes(self.expected, index, self.bands)


class Shuffled(ObjectSource):
    """Ranges arrive in another order than they were asked for."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self.chosen = random.Random(3)
        self.read_bytes = 0
        self.names: list[str] = []

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        self.names.append(key.rpartition("/")[2])
        self.read_bytes += sum(len(view) for view in into)
        for _ in range(self.chosen.randrange(30)):
            await asyncio.sleep(0)
        await super().read_ranges(key, start, into, on_filled)


@pytest.mark.parametrize("first_ratio", [None, 0.05, 0.1, 0.3])
async def test_layers_are_announced_in_order_and_each_is_whole(
    stores: Stores, first_ratio: float | None
) -> None:
    await _committed(stores)
    bands = len(RATIOS) if first_ratio is None else RATIOS.index(first_ratio) + 1
    watch = Watch(ROWS, bands)
    loaded = await stores.load(
        FACTS, source=Shuffled(stores.objects), first_ratio=first_ratio, observer=watch
    )
    assert watch.layers == list(range(NUM_LAYERS))
    assert watch.first_at == NUM_LAYERS
    assert watch.rows is not None
    assert watch.rows.layers is loaded.rows.layers
    assert_equal_rows(loaded.rows, ROWS)


class Withheld(ObjectSource):
    """The range ``last`` comes only after an announcement."""

    def __init__(self, objects: Objects, last: tuple[str, int] | None) -> None:
        super().__init__(objects)
        self.last = last
        self.announced = asyncio.Event()
        self.begun: list[tuple[str, int]] = []

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        self.begun.append((key, start))
        if (key, start) == self.last:
            await self.announced.wait()
        await super().read_ranges(key, start, into, on_filled)


@pytest.mark.timeout(30)
async def test_a_layer_is_announced_while_later_ones_are_still_read(stores: Stores) -> None:
    await _committed(stores)
    before = Withheld(stores.objects, None)
    await stores.load(FACTS, source=before)
    # The end of a slab is of the last layer, whichever range is begun last.
    last = max(range_ for range_ in before.begun if range_[0].endswith(HIGH_SLAB))
    source = Withheld(stores.objects, last)
    watch = Watch(ROWS, len(RATIOS))
    watch.then = lambda _: source.announced.set()
    await stores.load(FACTS, source=source, observer=watch)
    assert source.begun.count(last) == 1


async def test_no_byte_above_the_first_ratio_is_read_before_it_is_announced(
    stores: Stores,
) -> None:
    await _committed(stores)
    source = Shuffled(stores.objects)
    seen: list[list[str]] = []
    watch = Watch(ROWS, FIRST_BANDS)
    watch.then = lambda event: seen.append(source.names.copy()) if event == "first" else None
    await stores.load(FACTS, source=source, first_ratio=FIRST, observer=watch)
    assert HIGH_SLAB not in seen[0]
    assert HIGH_SLAB in source.names


@pytest.mark.parametrize("bands", [1, 2, 3])
async def test_a_load_reads_exactly_the_slabs_of_its_ratio(stores: Stores, bands: int) -> None:
    await _committed(stores)
    source = Shuffled(stores.objects)
    loaded = await stores.load(FACTS, RATIOS[bands - 1], source=source)
    slabs = loaded.manifest.slabs
    assert source.read_bytes == sum(slab.size_bytes for slab in slabs[:bands])
    assert set(source.names) == {f"kv-{band:02d}.safetensors" for band in range(bands)}


@pytest.mark.parametrize(("first_ratio", "ratio"), [(0.3, 0.1), (0.07, 0.3)])
async def test_a_first_ratio_that_is_no_cut_or_above_the_ratio_is_refused(
    stores: Stores, first_ratio: float, ratio: float
) -> None:
    await _committed(stores)
    with pytest.raises(Invalid, match="ratio"):
        await stores.load(FACTS, ratio, first_ratio=first_ratio)


@pytest.mark.parametrize("damage", ["wrong", "missing"])
async def test_what_was_announced_stays_valid_when_the_rest_fails(
    stores: Stores, damage: str
) -> None:
    cache = await _committed(stores)
    path = stores.folder(cache) / HIGH_SLAB
    if damage == "wrong":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    watch = Watch(ROWS, FIRST_BANDS)
    with pytest.raises(Corrupt) as corrupt:
        await stores.load(FACTS, first_ratio=FIRST, observer=watch)
    assert corrupt.value.generation == cache.generation
    assert watch.first_at == NUM_LAYERS
    watch.check()


async def test_a_layer_that_is_wrong_is_never_announced(stores: Stores) -> None:
    cache = await _committed(stores)
    path = stores.folder(cache) / HIGH_SLAB
    content = bytearray(path.read_bytes())
    # bfloat16 rows lie behind positions and counts, the last layer at the very end.
    content[-1] ^= 1
    path.write_bytes(content)
    watch = Watch(ROWS, len(RATIOS))
    with pytest.raises(Corrupt, match=f"layer {NUM_LAYERS - 1}"):
        await stores.load(FACTS, observer=watch)
    assert watch.layers == list(range(NUM_LAYERS - 1))
    assert watch.first_at is None
    watch.check()


class Away(ObjectSource):
    """One slab is unavailable for the first times."""

    def __init__(self, objects: Objects, name: str, times: int, *, abandoned: bool) -> None:
        super().__init__(objects)
        self.name = name
        self.times = times
        self.abandoned = abandoned
        self.late: list[memoryview] = []

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        if key.endswith(self.name) and start and self.times:
            self.times -= 1
            self.late.extend(into)
            raise ObjectsUnavailable("read", "away", abandoned=self.abandoned)
        await super().read_ranges(key, start, into, on_filled)


async def test_trouble_in_the_later_phase_is_retried_in_place(stores: Stores) -> None:
    await _committed(stores)
    watch = Watch(ROWS, FIRST_BANDS)
    away = Away(stores.objects, HIGH_SLAB, ATTEMPTS - 1, abandoned=False)
    loaded = await stores.load(FACTS, source=away, first_ratio=FIRST, observer=watch)
    assert_equal_rows(loaded.rows, ROWS)


async def test_a_read_given_up_in_the_later_phase_ends_the_load_and_harms_nothing_announced(
    stores: Stores,
) -> None:
    await _committed(stores)
    watch = Watch(ROWS, FIRST_BANDS)
    away = Away(stores.objects, HIGH_SLAB, 1, abandoned=True)
    with pytest.raises(ObjectsUnavailable, match="away"):
        await stores.load(FACTS, source=away, first_ratio=FIRST, observer=watch)
    for view in away.late:
        view[:] = os.urandom(len(view))
    watch.check()


async def test_an_observer_never_gets_buffers_that_a_late_read_may_write_to(
    stores: Stores,
) -> None:
    await _committed(stores)
    watch = Watch(ROWS, len(RATIOS))
    # The slab of the first band holds something of every layer.
    away = Away(stores.objects, "kv-00.safetensors", 1, abandoned=True)
    loaded = await stores.load(FACTS, source=away, observer=watch)
    for view in away.late:
        view[:] = os.urandom(len(view))
    assert away.late
    watch.check()
    assert_equal_rows(loaded.rows, ROWS)


class ActsOn(ObjectSource):
    """Does something before it first looks at a slab."""

    def __init__(self, objects: Objects, name: str, act: Callable[[], Awaitable[None]]) -> None:
        super().__init__(objects)
        self.name = name
        self.act = act

    async def size(self, key: str) -> int:
        if key.endswith(self.name):
            self.name = "done"
            await self.act()
        return await super().size(key)


@pytest.mark.parametrize("name", ["kv-00.safetensors", HIGH_SLAB])
async def test_a_generation_that_goes_away_is_replaced_only_before_anything_was_announced(
    stores: Stores, name: str
) -> None:
    old = await _committed(stores)
    rebuilt = random_rows(5, counts=ROWS.counts, remainder=True)

    async def rebuild() -> None:
        await stores.build(rebuilt, FACTS)
        shutil.rmtree(stores.folder(old))

    source = ActsOn(stores.objects, name, rebuild)
    announced = name == HIGH_SLAB
    watch = Watch(ROWS if announced else rebuilt, FIRST_BANDS)
    if announced:
        with pytest.raises(NotFound, match="generation"):
            await stores.load(FACTS, source=source, first_ratio=FIRST, observer=watch)
    else:
        loaded = await stores.load(FACTS, source=source, first_ratio=FIRST, observer=watch)
        assert_equal_rows(loaded.rows, rebuilt)
    assert watch.first_at == NUM_LAYERS
    watch.check()
