import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

from kvkeep_storage import durable
from kvkeep_storage.errors import Conflict, Corrupt, Full, Invalid, NotFound, ObjectsUnavailable
from kvkeep_storage.objects import Objects

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """Both ways through the code; a store in memory stands for every remote one."""
    if request.param == "local":
        return Objects.open(f"file://{tmp_path}/store")
    return Objects(MemoryStore(), root=None)


@pytest.fixture
def local(tmp_path: Path) -> Objects:
    return Objects.open(f"file://{tmp_path}/store")


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


async def test_the_store_keeps_the_identity_it_was_given_once(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    assert await Objects.open(url).find_store_id() is None
    first, second = await asyncio.gather(Objects.open(url).store_id(), Objects.open(url).store_id())
    assert first == second == await Objects.open(url).find_store_id()
    assert first != await Objects.open(f"file://{tmp_path}/other").store_id()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"store_id": "x", "schema": 2}'])
async def test_a_damaged_identity_is_never_replaced(store: Objects, content: bytes) -> None:
    await store.put("store.json", content)
    with pytest.raises(Corrupt):
        await store.store_id()
    assert await store.get("store.json") == content


async def test_a_directory_with_odd_characters_is_the_one_that_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20ü"
    opened = Objects.open(folder.as_uri())
    await opened.put("x", b"1")
    assert (folder / "x").read_bytes() == b"1"
    assert await opened.get("x") == b"1"


@pytest.mark.parametrize("url", ["", "relative", "file://host/path", "nonsense://x"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(Invalid, match="objects_url"):
        Objects.open(url)


async def test_a_store_that_does_not_answer_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    for name in ("get_async", "put_async", "head_async", "delete_async", "get_range_async"):
        monkeypatch.setattr(obstore, name, never)
    monkeypatch.setattr(obstore, "list_with_delimiter_async", never)
    stalled = Objects(MemoryStore(), root=None, deadline_seconds=0.01)
    calls: list[Callable[[], Any]] = [
        lambda: stalled.get("x"),
        lambda: stalled.put("x", b"1"),
        lambda: stalled.put_if_absent("x", b"1"),
        lambda: stalled.size("x"),
        lambda: stalled.delete("x"),
        lambda: stalled.directories_below("x"),
        lambda: stalled.read_ranges("x", 0, [memoryview(bytearray(1))]),
    ]
    for call in calls:
        with pytest.raises(ObjectsUnavailable, match="no answer") as error:
            await call()
        assert error.value.abandoned


async def test_a_disk_that_does_not_answer_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "to_thread", never)
    stalled = Objects(LocalStore(tmp_path), root=tmp_path, deadline_seconds=0.01)
    (tmp_path / "x").write_bytes(b"1")
    for call in (
        stalled.put("x", b"1"),
        stalled.put_if_absent("y", b"1"),
        stalled.delete("x"),
        stalled.read_ranges("x", 0, [memoryview(bytearray(1))]),
        stalled.delete_temporary_files(0),
    ):
        with pytest.raises(ObjectsUnavailable, match="no answer") as error:
            await call
        assert error.value.abandoned


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_no_space_is_full_and_other_trouble_is_unavailable(
    local: Objects, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: int) -> Callable[..., None]:
        def write(*_: Any, **__: Any) -> None:
            raise OSError(error, "trouble")

        return write

    monkeypatch.setattr(durable, "replace", failing(code))
    with pytest.raises(Full) as full:
        await local.put("x", b"1234")
    assert (full.value.name, full.value.size_bytes) == ("x", 4)
    monkeypatch.setattr(durable, "replace", failing(errno.EIO))
    with pytest.raises(ObjectsUnavailable, match="trouble"):
        await local.put("x", b"1234")


async def test_a_range_that_comes_short_is_unavailable_not_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def short(*_: Any, **__: Any) -> bytes:
        return b"12"

    remote = Objects(MemoryStore(), root=None)
    await remote.put("x", b"1234")
    monkeypatch.setattr(obstore, "get_range_async", short)
    with pytest.raises(ObjectsUnavailable, match="2 of 4 bytes") as error:
        await remote.read_ranges("x", 0, [memoryview(bytearray(4))])
    assert not error.value.abandoned


async def test_temporary_files_are_not_objects_and_go_when_they_are_old(
    local: Objects, tmp_path: Path
) -> None:
    await local.put("caches/t/x", b"1")
    old, new = (tmp_path / "store" / "caches" / f".kvkeep-{n}.tmp" for n in ("0", "1"))
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert [item.key for item in await local.objects_below("caches")] == ["caches/t/x"]
    assert await local.delete_temporary_files(3600) == [4]
    assert not old.exists()
    assert new.exists()
    assert await local.get("caches/t/x") == b"1"


async def test_a_vanished_directory_is_unavailable_and_stays_gone(
    local: Objects, tmp_path: Path
) -> None:
    (tmp_path / "store").rmdir()
    with pytest.raises(ObjectsUnavailable, match="vanished"):
        await local.put("x", b"1")
    assert not (tmp_path / "store").exists()
