"""Faults on request: what they do, and that nothing wrong comes of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvkeep_storage.errors import Invalid, ObjectsUnavailable, StorageError
from kvkeep_storage.faults import Faults
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import Stores

pytestmark = pytest.mark.anyio

CONTENT = bytes(range(256))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def test_every_kind_of_fault_is_written_by_its_name() -> None:
    text = "error=0.05, delay=0.1,short=0.02,flip=0.03,lost=1,delay_seconds=2.5,seed=7"
    assert Faults.parse(text) == Faults(0.05, 0.1, 0.02, 0.03, 1.0, 2.5, 7)
    assert Faults.parse("error=0") == Faults()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is none of delay, delay_seconds, error, flip, lost, seed, short"),
        ("error", "error = '' is not a number"),
        ("errors=0.1", "'errors' is none of"),
        ("error=0.1,", "'' is none of"),
        ("error=often", "error = 'often' is not a number"),
        ("error=1.5", "error = 1.5 is not between 0 and 1"),
        ("flip=-0.1", "flip = -0.1 is not between 0 and 1"),
        ("short=nan", "short = nan is not between 0 and 1"),
        ("delay_seconds=1e9", "delay_seconds = 1e9 is not between 0 and 600"),
        ("seed=0.5", "seed = '0.5' is not a number"),
        ("flip=0.1,flip=0.2", "flip stands there twice"),
    ],
)
def test_faults_that_mean_nothing_are_refused(text: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        Faults.parse(text)
    assert said in str(refused.value)


async def test_an_error_comes_before_anything_has_happened(url: str) -> None:
    await Objects.open(url).put("x", b"before")
    failing = Objects.open(url, faults=Faults(error=1.0))
    for call in (
        failing.put("x", CONTENT),
        failing.put_if_absent("y", CONTENT),
        failing.get("x"),
        failing.size("x"),
        failing.read_ranges("x", 0, [memoryview(bytearray(1))]),
        failing.delete("x"),
        failing.objects_below(""),
        failing.directories_below(""),
        failing.delete_temporary_files(0),
    ):
        with pytest.raises(ObjectsUnavailable, match="injected"):
            await call
    found = await Objects.open(url).objects_below("")
    assert [(item.key, item.size_bytes) for item in found] == [("x", 6)]


async def test_a_lost_reply_comes_after_it_has_happened(url: str) -> None:
    lossy = Objects.open(url, faults=Faults(lost=1.0))
    for call in (lossy.put("x", CONTENT), lossy.put_if_absent("y", CONTENT)):
        with pytest.raises(ObjectsUnavailable, match="injected"):
            await call
    assert await lossy.get("x") == await lossy.get("y") == CONTENT
    with pytest.raises(ObjectsUnavailable, match="injected"):
        await lossy.delete("x")
    assert [item.key for item in await lossy.objects_below("")] == ["y"]


async def test_a_flip_changes_one_bit_of_what_is_read_and_none_of_what_is_stored(url: str) -> None:
    flipping = Objects.open(url, faults=Faults(flip=1.0))
    await flipping.put("x", CONTENT)
    into = [bytearray(100), bytearray(0), bytearray(156)]
    heard = bytearray()

    def hear(offset: int, views: Sequence[memoryview]) -> None:
        heard.extend(b"".join(views))

    await flipping.read_ranges("x", 0, [memoryview(part) for part in into], hear)
    # Whoever looks while it is read sees what everybody sees afterwards.
    assert heard == b"".join(into)
    for content in (b"".join(into), await flipping.get("x")):
        assert len(content) == len(CONTENT)
        changed = int.from_bytes(content) ^ int.from_bytes(CONTENT)
        assert changed.bit_count() == 1
    assert await Objects.open(url).get("x") == CONTENT
    await flipping.put("empty", b"")
    assert await flipping.get("empty") == b""


async def test_a_short_read_gives_half(url: str) -> None:
    short = Objects.open(url, faults=Faults(short=1.0))
    await short.put("x", CONTENT)
    assert await short.get("x") == CONTENT[:128]
    into = [bytearray(100), bytearray(156)]
    with pytest.raises(ObjectsUnavailable, match="half-way"):
        await short.read_ranges("x", 0, [memoryview(part) for part in into])
    assert b"".join(into) == CONTENT[:128] + bytes(128)


async def _outcomes(url: str, faults: Faults) -> list[bytes | str]:
    store = Objects.open(url, faults=faults)
    outcomes: list[bytes | str] = []
    for _ in range(200):
        try:
            outcomes.append(await store.get("x"))
        except ObjectsUnavailable as error:
            outcomes.append(str(error))
    return outcomes


async def test_the_same_seed_meets_the_same_faults_at_about_their_rate(url: str) -> None:
    await Objects.open(url).put("x", CONTENT)
    faults = Faults(error=0.2, short=0.1, flip=0.1, seed=5)
    first = await _outcomes(url, faults)
    assert await _outcomes(url, faults) == first
    assert await _outcomes(url, Faults(error=0.2, short=0.1, flip=0.1, seed=6)) != first
    assert 20 <= sum(isinstance(outcome, str) for outcome in first) <= 60
    assert 20 <= sum(isinstance(outcome, bytes) and outcome != CONTENT for outcome in first) <= 60


@pytest.mark.usefixtures("retries_do_not_wait")
async def test_field_09_what_a_store_full_of_faults_answers_is_right_or_an_error(
    metadata: Metadata, tmp_path: Path
) -> None:
    rows = random_rows()
    facts = facts_for(rows)
    stores = await Stores.open(tmp_path, metadata)
    await stores.register(facts)
    faults = Faults(error=0.2, short=0.1, flip=0.3, lost=0.2, seed=3)
    stores.objects = Objects.open(f"file://{tmp_path}", faults=faults)
    built = False
    right = refused = 0
    for _ in range(120):
        try:
            if not built:
                await stores.build(rows, facts)
                built = True
            loaded = await stores.load(facts)
        except StorageError:
            refused += 1
        else:
            assert_equal_rows(loaded.rows, rows)
            right += 1
    # Both happened, or the rates say nothing about either.
    assert right > 5
    assert refused > 5
