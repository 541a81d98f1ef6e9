import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvkeep_storage import durable, pieces

WRITES = [durable.create, durable.replace]


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("content", [b"", b"x", b"abc" * 100_000])
def test_what_was_written_is_there_whole_and_alone(
    write: Callable[..., None], content: bytes, tmp_path: Path
) -> None:
    write(tmp_path / "a" / "b" / "c.bin", content, root=tmp_path)
    assert (tmp_path / "a" / "b" / "c.bin").read_bytes() == content
    assert _files(tmp_path) == ["a/b/c.bin"]


def test_create_never_overwrites(tmp_path: Path) -> None:
    durable.create(tmp_path / "x", b"first", root=tmp_path)
    with pytest.raises(FileExistsError):
        durable.create(tmp_path / "x", b"second", root=tmp_path)
    assert (tmp_path / "x").read_bytes() == b"first"
    assert _files(tmp_path) == ["x"]


def test_replace_overwrites(tmp_path: Path) -> None:
    durable.replace(tmp_path / "x", b"first", root=tmp_path)
    durable.replace(tmp_path / "x", b"second", root=tmp_path)
    assert (tmp_path / "x").read_bytes() == b"second"


@pytest.mark.parametrize(
    ("write", "publish"), [(durable.create, "link"), (durable.replace, "replace")]
)
def test_field_26_everything_is_synced_in_the_order_that_survives_power_loss(
    write: Callable[..., None], publish: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    opened: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "link", "replace")}

    def opening(path: Any, *args: Any, **kwargs: Any) -> int:
        descriptor: int = real["open"](path, *args, **kwargs)
        opened[descriptor] = "temp" if durable.is_temporary(Path(path).name) else str(path)
        return descriptor

    def recording(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            target = opened[args[0]] if name in ("write", "fsync") else ""
            done.append(f"{name} {target}".strip())
            return real[name](*args, **kwargs)

        return call

    monkeypatch.setattr(os, "open", opening)
    for name in ("write", "fsync", "link", "replace"):
        monkeypatch.setattr(os, name, recording(name))
    write(tmp_path / "a" / "x", b"content", root=tmp_path)
    assert done == [
        "write temp",
        "fsync temp",
        publish,
        f"fsync {tmp_path / 'a'}",
        f"fsync {tmp_path}",
    ]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("failing", ["write", "fsync", "publish"])
def test_a_failed_write_leaves_nothing_behind(
    write: Callable[..., None], failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"before")
    target = tmp_path / ("x" if write is durable.replace else "y")

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    names = ["link", "replace"] if failing == "publish" else [failing]
    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(os, name, no_space)
        with pytest.raises(OSError, match="no space"):
            write(target, b"content", root=tmp_path)
    assert _files(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"before"


def test_a_write_that_the_kernel_cuts_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, rest: real(descriptor, rest[:3]))
    durable.create(tmp_path / "x", b"0123456789", root=tmp_path)
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_a_file_of_the_wrong_length_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file system that says it wrote, and did not.
    monkeypatch.setattr(os, "write", lambda _, rest: len(rest))
    with pytest.raises(OSError, match="0 of 3 bytes"):
        durable.create(tmp_path / "x", b"abc", root=tmp_path)
    assert _files(tmp_path) == []


def test_a_store_whose_directory_has_vanished_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "gone"
    with pytest.raises(OSError, match="vanished"):
        durable.create(root / "a" / "x", b"content", root=root)
    assert not root.exists()


def test_delete_removes_the_file_and_what_it_leaves_empty(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    durable.create(root / "a" / "b" / "x", b"1", root=root)
    durable.create(root / "a" / "y", b"2", root=root)
    durable.delete(root / "a" / "b" / "x", root=root)
    assert [path.name for path in root.rglob("*")] == ["a", "y"]
    durable.delete(root / "a" / "y", root=root)
    assert list(root.rglob("*")) == []
    assert root.is_dir()


def test_deleting_what_is_missing_is_success(tmp_path: Path) -> None:
    durable.delete(tmp_path / "no" / "such", root=tmp_path)
    # A write that found no space has left the directories that it made.
    (tmp_path / "a" / "b").mkdir(parents=True)
    durable.delete(tmp_path / "a" / "b" / "never written", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_deletion_is_on_disk_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable.create(tmp_path / "x", b"1", root=tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    durable.delete(tmp_path / "x", root=tmp_path)
    assert synced == [tmp_path.stat().st_ino]


def test_reads_fill_exactly_their_part(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    into = bytearray(b"......")
    durable.read_scattered(tmp_path / "x", [memoryview(into)[1:5]], 3)
    assert into == b".3456."


def test_a_read_past_the_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123")
    with pytest.raises(EOFError, match="byte 4"):
        durable.read_scattered(tmp_path / "x", [memoryview(bytearray(5))], 0)


@pytest.mark.parametrize("limits", [(1024, 2**30), (1, 2**30), (2, 2**30), (1024, 1), (2, 3)])
def test_a_scattered_read_fills_every_buffer_however_the_kernel_cuts_it(
    limits: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers_max, bytes_max = limits
    real = os.preadv

    def cut(descriptor: int, into: list[memoryview], offset: int) -> int:
        assert len(into) <= buffers_max
        taken = []
        room = bytes_max
        for view in into:
            taken.append(view[:room])
            room -= len(taken[-1])
        return real(descriptor, taken, offset)

    monkeypatch.setattr(pieces, "_VIEWS_MAX", buffers_max)
    monkeypatch.setattr(os, "preadv", cut)
    (tmp_path / "x").write_bytes(b"0123456789")
    into = [bytearray(size) for size in (1, 0, 4, 2, 0)]
    heard = bytearray()

    def hear(offset: int, views: Sequence[memoryview]) -> None:
        assert offset == 2 + len(heard)
        heard.extend(b"".join(views))

    durable.read_scattered(tmp_path / "x", [memoryview(part) for part in into], 2, hear)
    assert into == [b"2", b"", b"3456", b"78", b""]
    assert heard == b"2345678"


def test_a_scattered_read_past_the_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123")
    with pytest.raises(EOFError, match="byte 4"):
        durable.read_scattered(tmp_path / "x", [memoryview(bytearray(2)) for _ in range(3)], 0)


def test_only_leftovers_of_writes_count_as_temporary(tmp_path: Path) -> None:
    leftover = tmp_path / "a" / ".kvkeep-00112233.tmp"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half")
    os.utime(leftover, (1, 1))
    (tmp_path / "a" / "x.tmp").write_bytes(b"somebody else's")
    (tmp_path / ".hidden").write_bytes(b"somebody else's")
    (found,) = durable.temporary_files(tmp_path)
    assert (found.path, found.size_bytes) == (leftover, 4)
    assert found.age_seconds > 1_000_000


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_file_in_writing_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    looks: list[list[durable.TemporaryFile]] = []
    real = getattr(os, step)

    def looking(*arguments: object) -> None:
        looks.append(list(durable.temporary_files(tmp_path)))
        real(*arguments)

    monkeypatch.setattr(os, step, looking)
    durable.create(tmp_path / "a" / "x", b"abc", root=tmp_path)
    assert looks
    assert looks[0] == []


def test_writing_beside_somebody_who_empties_the_directory_succeeds(tmp_path: Path) -> None:
    def write_and_delete(name: str) -> None:
        for _ in range(300):
            durable.replace(tmp_path / "a" / name, b"1", root=tmp_path)
            durable.delete(tmp_path / "a" / name, root=tmp_path)

    with ThreadPoolExecutor(3) as threads:
        for written in [threads.submit(write_and_delete, name) for name in "xyz"]:
            written.result()
    assert list(tmp_path.iterdir()) == []
