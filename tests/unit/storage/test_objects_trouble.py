"""How an object store fails: always typed, always within its deadline."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvkeep_storage import durable, local_backend
from kvkeep_storage.errors import Full, ObjectsUnavailable
from kvkeep_storage.faults import Faults
from kvkeep_storage.objects import Objects

pytestmark = pytest.mark.anyio


@pytest.fixture
def local(tmp_path: Path) -> Objects:
    return Objects.open(f"file://{tmp_path}/store")


async def test_a_directory_with_odd_characters_is_the_one_that_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20ü"
    opened = Objects.open(folder.as_uri())
    await opened.put("x", b"1")
    assert (folder / "x").read_bytes() == b"1"
    assert await opened.get("x") == b"1"


async def test_a_store_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    slow = Faults(delay=1.0, delay_seconds=60)
    stalled = Objects.open(f"file://{tmp_path}", deadline_seconds=0.01, faults=slow)
    (tmp_path / "x").write_bytes(b"1")
    for call in (
        stalled.get("x"),
        stalled.put("x", b"2"),
        stalled.put_if_absent("y", b"1"),
        stalled.size("x"),
        stalled.delete("x"),
        stalled.objects_below(""),
        stalled.directories_below(""),
        stalled.read_ranges("x", 0, [memoryview(bytearray(1))]),
        stalled.delete_temporary_files(0),
    ):
        with pytest.raises(ObjectsUnavailable, match=r"no answer in 0\.01 s") as error:
            await call
        assert error.value.abandoned
    assert (tmp_path / "x").read_bytes() == b"1"
    with pytest.raises(ObjectsUnavailable, match=r": no answer in 0\.02 s"):
        await Objects.open(f"file://{tmp_path}", faults=slow).check(deadline_seconds=0.02)


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
    with pytest.raises(ObjectsUnavailable, match="vanished"):
        await local.objects_below("")
    with pytest.raises(ObjectsUnavailable, match="vanished"):
        await local.directories_below("caches")


async def test_a_directory_that_cannot_be_listed_is_unavailable_not_empty(
    local: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await local.put("caches/a/x", b"1")
    real = os.scandir

    def failing(path: Any) -> Any:
        if str(path).endswith("caches/a"):
            raise OSError(errno.EIO, "trouble")
        return real(path)

    monkeypatch.setattr(os, "scandir", failing)
    for call in (local.objects_below("caches"), local.directories_below("caches/a")):
        with pytest.raises(ObjectsUnavailable, match="trouble"):
            await call


async def test_a_listing_longer_than_a_page_is_whole(
    local: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_backend, "_FILES_PER_PAGE", 2)
    for name in "abcde":
        await local.put(f"caches/{name}", b"1")
    found = await local.objects_below("caches")
    assert sorted(item.key for item in found) == [f"caches/{name}" for name in "abcde"]


async def test_a_root_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectsUnavailable, match="file/store"):
        Objects.open(f"file://{tmp_path}/file/store")
