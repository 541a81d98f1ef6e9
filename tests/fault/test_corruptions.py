"""Ten thousand random corruptions of stored files: every one is found before a byte is used.

A seed is drawn, and named in what fails; set ``KVKEEP_TEST_SEED`` to repeat a run.
"""

import asyncio
import os
import random
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvkeep_storage.arrival import Announcer, ArrivingRows
from kvkeep_storage.artifact import CacheDtype, CacheRows, Quantization
from kvkeep_storage.errors import Corrupt
from kvkeep_storage.layer_parts import layer_parts
from kvkeep_storage.load import LoadedCache, read_generation
from kvkeep_storage.manifest import Manifest, ManifestFacts
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.sources import Origin, Source

from ..support.caches import RATIOS, assert_equal_rows, facts_for, random_rows
from ..support.stores import Stores

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

CORRUPTIONS = 10_000
# Through records, leases and the real object store as well.
LOADS = 300
MANIFEST = "manifest.json"
SEED = int(os.environ.get("KVKEEP_TEST_SEED") or secrets.randbelow(2**32))

SHAPES: tuple[tuple[CacheDtype, Quantization, int, int, int, int, bool], ...] = (
    # dtype, quantisation, layers, heads, head_dim, most rows of a head in a band, remainders
    ("bfloat16", "none", 2, 2, 8, 5, True),
    ("bfloat16", "int4", 5, 1, 4, 3, True),
    ("float16", "none", 3, 3, 2, 4, False),
    ("float32", "none", 1, 4, 3, 6, True),
    ("float32", "none", 4, 2, 1, 2, False),
)

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Victim:
    """A committed cache, and the files that could be mistaken for its own."""

    rows: CacheRows
    facts: ManifestFacts
    cache: CacheRecord
    folder: Path
    good: Files
    old_generation: Files
    other_context: Files


class Folder:
    """The files of a store, read without a thread for each: only the reading is on trial."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    async def size(self, key: str) -> int:
        return (self.root / key).stat().st_size

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        content = memoryview((self.root / key).read_bytes())[start:]
        for view in into:
            if len(content) < len(view):
                raise Corrupt(key, "ends too early")
            view[:], content = content[: len(view)], content[len(view) :]
            if on_filled is not None:
                on_filled(start, [view])
            start += len(view)

    async def forget(self, prefix: str) -> None:
        pass

    async def origin(self, prefix: str) -> Origin:
        return "store"


class Watch:
    """Whatever is announced must be right, also when the load fails later."""

    def __init__(self, expected: CacheRows, bands: int) -> None:
        self.expected = _parts(expected, bands)
        self.bands = bands
        self.rows: ArrivingRows | None = None

    def on_room(self, rows: ArrivingRows, manifest: Manifest, generation: str) -> None:
        self.rows = rows

    def on_layer(self, index: int) -> None:
        assert self.rows is not None
        assert _parts(self.rows, self.bands)[index] == self.expected[index]

    def on_first(self) -> None:
        pass


def _parts(rows: CacheRows | ArrivingRows, bands: int) -> list[list[bytes]]:
    """What each layer holds in its first bands."""
    found: list[list[bytes]] = [[] for _ in rows.layers]
    for part in layer_parts(rows.counts, rows.layers, range(bands)):
        found[part.layer] += [view.tobytes() for views in part.tensors[1:] for view in views]
    return found


Damage = Callable[[random.Random, Victim, str], Files]
Load = Callable[[Victim, float, float, Watch], Awaitable[LoadedCache]]


def _flip_bit(chosen: random.Random, victim: Victim, name: str) -> Files:
    content = bytearray(victim.good[name])
    content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    return {name: bytes(content)}


def _flip_byte(chosen: random.Random, victim: Victim, name: str) -> Files:
    content = bytearray(victim.good[name])
    content[chosen.randrange(len(content))] ^= chosen.randrange(1, 256)
    return {name: bytes(content)}


def _truncate(chosen: random.Random, victim: Victim, name: str) -> Files:
    content = victim.good[name]
    return {name: content[: chosen.randrange(len(content))]}


def _extend(chosen: random.Random, victim: Victim, name: str) -> Files:
    return {name: victim.good[name] + chosen.randbytes(chosen.randrange(1, 100))}


def _swap_ranges(chosen: random.Random, victim: Victim, name: str) -> Files:
    content = victim.good[name]
    a, b, c, d = sorted(chosen.sample(range(len(content) + 1), 4))
    return {name: content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]}


def _duplicate_range(chosen: random.Random, victim: Victim, name: str) -> Files:
    """A range comes twice: over what was behind it, or before it."""
    content = victim.good[name]
    start, end = sorted(chosen.sample(range(len(content) + 1), 2))
    copied = content[start:end]
    if chosen.random() < 0.5:
        return {name: content[:end] + copied + content[end:]}
    return {name: (content[:end] + copied + content[end + len(copied) :])[: len(content)]}


def _swap_slabs(chosen: random.Random, victim: Victim, name: str) -> Files:
    slabs = [name for name in victim.good if name != MANIFEST]
    first, second = chosen.sample(slabs, 2)
    return {first: victim.good[second], second: victim.good[first]}


def _foreign(files: Files, chosen: random.Random, name: str) -> Files:
    """One file of another generation, or some of them, or all."""
    others = [other for other in files if chosen.random() < 0.3]
    return {other: files[other] for other in {name, *others}}


def _old_generation(chosen: random.Random, victim: Victim, name: str) -> Files:
    return _foreign(victim.old_generation, chosen, name)


def _other_context(chosen: random.Random, victim: Victim, name: str) -> Files:
    return _foreign(victim.other_context, chosen, name)


DAMAGES: tuple[Damage, ...] = (
    _flip_bit,
    _flip_byte,
    _truncate,
    _extend,
    _swap_ranges,
    _duplicate_range,
    _swap_slabs,
    _old_generation,
    _other_context,
)


def _corruption(chosen: random.Random, victim: Victim) -> tuple[str, Files]:
    """A random change of the stored files that does change them."""
    while True:
        damage = chosen.choice(DAMAGES)
        changed = damage(chosen, victim, chosen.choice(sorted(victim.good)))
        real = {name: new for name, new in changed.items() if new != victim.good[name]}
        if real:
            return f"{damage.__name__} of {', '.join(real)}", real


def _bands(chosen: random.Random, changed: Files) -> int:
    """So many bands that a load of them must use what was changed."""
    lowest = min(0 if name == MANIFEST else int(name[3:5]) for name in changed)
    return chosen.randint(lowest + 1, len(RATIOS))


def _read_files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def _victim(stores: Stores, number: int) -> Victim:
    dtype, quantization, layers, heads, head_dim, rows_max, remainder = SHAPES[number]
    rows = random_rows(
        number,
        dtype=dtype,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        rows_max=rows_max,
        quantization=quantization,
        remainder=remainder,
    )
    facts = facts_for(rows, token_ids_digest=f"document {number}")
    await stores.register(facts, f"ctx_{number}")
    # The same counts everywhere, so that every file has its namesakes' size.
    old = await stores.build(_like(rows, 100 + number), facts)
    cache = await stores.build(rows, facts)
    foreign = facts_for(rows, token_ids_digest=f"foreign {number}")
    await stores.register(foreign, f"ctx_{number}_foreign")
    other = await stores.build(_like(rows, 200 + number), foreign)
    folder = stores.folder(cache)
    kept = (_read_files(path) for path in (folder, stores.folder(old), stores.folder(other)))
    return Victim(rows, facts, cache, folder, *kept)


def _like(rows: CacheRows, seed: int) -> CacheRows:
    return random_rows(
        seed,
        dtype=rows.dtype,
        head_dim=rows.head_dim,
        counts=rows.counts,
        quantization=rows.quantization,
        remainder=rows.has_remainder,
    )


async def _expect_corrupt(chosen: random.Random, victim: Victim, load: Load) -> None:
    """Damage stored files, load what needs them, and put them back."""
    what, changed = _corruption(chosen, victim)
    bands = _bands(chosen, changed)
    first = chosen.randint(1, bands)
    watch = Watch(victim.rows, first)
    for name, content in changed.items():
        (victim.folder / name).write_bytes(content)
    try:
        await load(victim, RATIOS[bands - 1], RATIOS[first - 1], watch)
    except Corrupt:
        return
    except Exception as error:
        raise AssertionError(f"{what} was not Corrupt; KVKEEP_TEST_SEED={SEED}") from error
    finally:
        for name in changed:
            (victim.folder / name).write_bytes(victim.good[name])
    raise AssertionError(f"{what} was answered from; KVKEEP_TEST_SEED={SEED}")


async def _here(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


@pytest.fixture
def memory_backed() -> Iterator[Path]:
    """A directory that costs no disk writes, where the system has one."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
async def victims(stores: Stores, memory_backed: Path) -> list[Victim]:
    # The same store at another place.
    shutil.copy(stores.root / "store.json", memory_backed)
    stores.root = memory_backed
    stores.objects = Objects.open(memory_backed.as_uri())
    return [await _victim(stores, number) for number in range(len(SHAPES))]


@pytest.fixture
def chosen() -> random.Random:
    return random.Random(SEED)


async def test_ten_thousand_random_corruptions_are_found_before_a_byte_is_used(
    stores: Stores,
    victims: list[Victim],
    chosen: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Files of a few hundred bytes: threads would be most of the time.
    monkeypatch.setattr(asyncio, "to_thread", _here)
    source: Source = Folder(stores.root)

    async def load(victim: Victim, ratio: float, first_ratio: float, watch: Watch) -> LoadedCache:
        expected = victim.facts.fingerprint.model_identity
        announcer = Announcer(watch)
        return await read_generation(source, victim.cache, expected, ratio, first_ratio, announcer)

    async def damage(victim: Victim, mine: random.Random) -> None:
        for _ in range(CORRUPTIONS // len(victims)):
            await _expect_corrupt(mine, victim, load)
        # The files were fine all along, and are again.
        loaded = await load(victim, RATIOS[-1], RATIOS[0], Watch(victim.rows, 1))
        assert_equal_rows(loaded.rows, victim.rows)

    seeds = [chosen.randrange(2**32) for _ in victims]
    await asyncio.gather(*map(damage, victims, map(random.Random, seeds)))


async def test_random_corruptions_are_found_by_a_load_which_deletes_nothing(
    stores: Stores, victims: list[Victim], chosen: random.Random
) -> None:
    async def load(victim: Victim, ratio: float, first_ratio: float, watch: Watch) -> LoadedCache:
        return await stores.load(victim.facts, ratio, first_ratio=first_ratio, observer=watch)

    for number in range(LOADS):
        await _expect_corrupt(chosen, victims[number % len(victims)], load)
    for victim in victims:
        assert_equal_rows((await stores.load(victim.facts)).rows, victim.rows)
