"""Parts belong to who holds their lock, and a descriptor to who uses it."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep_storage import disk_parts
from kvkeep_storage.disk_parts import Descriptor, lock_part, part_of, reclaim_part


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return tmp_path / "kv-00.safetensors"


@pytest.fixture
def published_meanwhile(whole: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A part that gets its name between being opened and being locked by somebody else."""
    part_of(whole).write_bytes(b"whole")
    flock = fcntl.flock

    def late(number: int, operation: int) -> None:
        if not whole.exists():
            os.replace(part_of(whole), whole)
        flock(number, operation)

    monkeypatch.setattr(disk_parts.fcntl, "flock", late)
    yield
    assert whole.read_bytes() == b"whole"


@pytest.mark.usefixtures("published_meanwhile")
def test_what_is_whole_by_the_time_it_is_locked_is_never_filled_again(whole: Path) -> None:
    held = lock_part(part_of(whole))
    with held.used() as number:
        os.write(number, b"another")
    assert part_of(whole).read_bytes() == b"another"
    held.close()


@pytest.mark.usefixtures("published_meanwhile")
def test_what_is_whole_by_the_time_it_is_locked_is_no_leftover(whole: Path) -> None:
    assert not reclaim_part(part_of(whole))


def test_a_part_has_one_owner_until_that_is_done_with_it(whole: Path) -> None:
    part = part_of(whole)
    held = lock_part(part)
    with pytest.raises(BlockingIOError):
        lock_part(part)
    assert not reclaim_part(part)
    held.close()
    assert reclaim_part(part)
    assert not part.exists()
    assert reclaim_part(part)


def test_a_descriptor_stays_open_for_who_uses_it_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    descriptor = Descriptor(os.open(tmp_path / "file", os.O_RDONLY))
    with descriptor.used() as number:
        descriptor.close()
        descriptor.close()
        assert os.pread(number, 7, 0) == b"content"
        with pytest.raises(OSError, match="Bad file descriptor"), descriptor.used():
            pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
