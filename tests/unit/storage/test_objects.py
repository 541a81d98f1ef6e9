"""What an object store promises, whichever it is: a directory, SeaweedFS or moto."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvkeep_storage.errors import Conflict, Corrupt, NotFound
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import PIECE_BYTES

from ...support.s3_servers import S3Server, Seaweed, fresh_prefix

pytestmark = pytest.mark.anyio

# Three parts of an upload, the last one short.
LARGE_BYTES = 17 * 2**20 + 5


@pytest.fixture(
    params=[
        "local",
        pytest.param("seaweed", marks=pytest.mark.s3),
        pytest.param("moto_server", marks=pytest.mark.s3),
    ]
)
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URLs of empty stores of one kind: in one directory, or in one bucket."""
    if request.param == "local":
        return (f"file://{tmp_path}/{n}" for n in range(9))
    request.getfixturevalue("s3_credentials")
    found = request.getfixturevalue(request.param)
    server: S3Server = found.server if isinstance(found, Seaweed) else found
    return (server.url(fresh_prefix()) for _ in range(9))


@pytest.fixture
def store(urls: Iterator[str]) -> Objects:
    return Objects.open(next(urls))


async def test_what_was_put_is_there(store: Objects) -> None:
    await store.put("a/b/x", b"content")
    assert await store.get("a/b/x") == b"content"
    assert await store.size("a/b/x") == 7


async def test_put_overwrites_and_put_if_absent_does_not(store: Objects) -> None:
    await store.put("x", b"1")
    await store.put("x", b"22")
    with pytest.raises(Conflict):
        await store.put_if_absent("x", b"333")
    assert await store.get("x") == b"22"
    await store.put_if_absent("y", b"333")
    assert await store.get("y") == b"333"


async def test_exactly_one_of_many_creators_wins(store: Objects) -> None:
    outcomes = await asyncio.gather(
        *(store.put_if_absent("x", str(n).encode()) for n in range(8)), return_exceptions=True
    )
    winners = [n for n, outcome in enumerate(outcomes) if outcome is None]
    assert len(winners) == 1
    assert await store.get("x") == str(winners[0]).encode()
    assert all(isinstance(outcome, Conflict) for outcome in outcomes if outcome is not None)


async def test_what_is_missing_is_not_found_and_deleting_it_is_success(store: Objects) -> None:
    for read in (store.get("no/x"), store.size("no/x")):
        with pytest.raises(NotFound, match="no/x"):
            await read
    with pytest.raises(NotFound):
        await store.read_ranges("no/x", 0, [memoryview(bytearray(3))])
    await store.delete("no/x")
    await store.put("x", b"1")
    await store.delete("x")
    await store.delete("x")
    with pytest.raises(NotFound):
        await store.get("x")


async def test_one_read_fills_many_buffers_from_anywhere(store: Objects) -> None:
    await store.put("x", b"0123456789")
    into = [bytearray(size) for size in (3, 0, 1, 2)]
    await store.read_ranges("x", 2, [memoryview(part) for part in into])
    assert into == [b"234", b"", b"5", b"67"]
    await store.read_ranges("x", 10, [memoryview(bytearray())])


async def test_a_read_tells_of_every_byte_in_order_once_it_is_there(store: Objects) -> None:
    content = random.Random(5).randbytes(3 * PIECE_BYTES)
    await store.put("x", content)
    into = [bytearray(size) for size in (1, 0, 2 * PIECE_BYTES, 777)]
    heard = bytearray()

    def hear(offset: int, views: Sequence[memoryview]) -> None:
        assert offset == 5 + len(heard)
        assert 0 < sum(map(len, views)) <= PIECE_BYTES
        heard.extend(b"".join(views))

    await store.read_ranges("x", 5, [memoryview(part) for part in into], hear)
    assert heard == b"".join(into) == content[5 : 5 + len(heard)]
    assert len(heard) == 2 * PIECE_BYTES + 778


@pytest.mark.parametrize("start", [8, 10, 50])
async def test_an_object_that_ends_before_the_buffers_do_is_corrupt(
    store: Objects, start: int
) -> None:
    await store.put("x", b"0123456789")
    with pytest.raises(Corrupt, match="10 bytes are stored"):
        await store.read_ranges("x", start, [memoryview(bytearray(1)), memoryview(bytearray(2))])
    with pytest.raises(NotFound):
        await store.read_ranges("y", 0, [memoryview(bytearray(1))])


async def test_listing_finds_objects_below_and_directories_right_below(store: Objects) -> None:
    for key in ("a/1/x", "a/1/y", "a/2/z/w", "ab/x"):
        await store.put(key, key.encode())
    found = await store.objects_below("a")
    assert {item.key: item.size_bytes for item in found} == {"a/1/x": 5, "a/1/y": 5, "a/2/z/w": 7}
    assert sorted(await store.directories_below("a")) == ["1", "2"]
    assert await store.objects_below("nothing") == []
    assert await store.directories_below("nothing") == []


async def test_the_store_keeps_the_identity_it_was_given_once(urls: Iterator[str]) -> None:
    url, other = next(urls), next(urls)
    assert await Objects.open(url).find_store_id() is None
    first, second = await asyncio.gather(Objects.open(url).store_id(), Objects.open(url).store_id())
    assert first == second == await Objects.open(url).find_store_id()
    assert first != await Objects.open(other).store_id()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"store_id": "x", "schema": 2}'])
async def test_a_damaged_identity_is_never_replaced(store: Objects, content: bytes) -> None:
    await store.put("store.json", content)
    with pytest.raises(Corrupt):
        await store.store_id()
    assert await store.get("store.json") == content


async def test_two_stores_under_two_prefixes_never_see_each_other(urls: Iterator[str]) -> None:
    url = next(urls)
    path, _, query = url.partition("?")
    # One's name begins like the other's: a prefix ends where its last part ends.
    one, other = Objects.open(url), Objects.open(f"{path}2?{query}" if query else f"{path}2")
    await one.put("caches/x", b"1")
    await other.put("caches/y", b"22")
    await other.delete("caches/x")
    assert [item.key for item in await one.objects_below("caches")] == ["caches/x"]
    assert [item.key for item in await other.objects_below("caches")] == ["caches/y"]
    assert await one.directories_below("") == await other.directories_below("") == ["caches"]
    with pytest.raises(NotFound):
        await one.get("caches/y")


async def test_names_with_odd_characters_are_kept(store: Objects) -> None:
    for key in ("a/ü x%20+&=?#/y", "a/b.c-d_e~f(g)'h/y"):
        await store.put(key, key.encode())
        assert await store.get(key) == key.encode()
    found = [item.key for item in await store.objects_below("a")]
    assert sorted(found) == ["a/b.c-d_e~f(g)'h/y", "a/ü x%20+&=?#/y"]
    assert sorted(await store.directories_below("a")) == ["b.c-d_e~f(g)'h", "ü x%20+&=?#"]


async def test_field_33_a_large_object_arrives_whole_in_parts_and_its_size_says_so(
    store: Objects,
) -> None:
    content = random.Random(3).randbytes(LARGE_BYTES)
    await store.put("slab", content)
    assert await store.size("slab") == LARGE_BYTES
    middle = 8 * 2**20
    into = [bytearray(middle), bytearray(1), bytearray(LARGE_BYTES - middle - 1)]
    await store.read_ranges("slab", 0, [memoryview(part) for part in into])
    assert b"".join(into) == content
    tail = bytearray(7)
    await store.read_ranges("slab", LARGE_BYTES - 7, [memoryview(tail)])
    assert tail == content[-7:]
    assert await store.get("slab") == content


async def test_an_object_of_no_bytes_is_an_object(store: Objects) -> None:
    await store.put("empty", b"")
    assert await store.get("empty") == b""
    assert await store.size("empty") == 0
    await store.read_ranges("empty", 0, [])
    with pytest.raises(Corrupt, match="0 bytes are stored"):
        await store.read_ranges("empty", 0, [memoryview(bytearray(1))])


async def test_a_listing_says_when_an_object_was_written(store: Objects) -> None:
    before = time.time()
    await store.put("a/x", b"1")
    [item] = await store.objects_below("a")
    # Servers round to seconds.
    assert before - 1.1 <= item.modified_at <= time.time() + 1.1


async def test_a_check_of_a_store_that_works_changes_nothing(store: Objects) -> None:
    await store.check(deadline_seconds=20)
    assert await store.objects_below("") == []
    store_id = await store.store_id()
    await store.check(deadline_seconds=20)
    assert [item.key for item in await store.objects_below("")] == ["store.json"]
    assert await store.find_store_id() == store_id


async def test_a_directory_whose_last_object_is_gone_is_none(store: Objects) -> None:
    for key in ("a/1/x", "a/2/y/z", "a/w"):
        await store.put(key, b"1")
    await store.delete("a/1/x")
    assert await store.directories_below("a") == ["2"]
    await store.delete("a/2/y/z")
    assert await store.directories_below("a") == []
    assert await store.directories_below("") == ["a"]
