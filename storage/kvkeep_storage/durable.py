"""Local files that survive power loss: the only place that links or renames.

Every write goes: temporary file in the same directory → write → check length → fsync →
link or rename → fsync directory. A crash before the last but one step leaves a temporary file,
which ``temporary_files`` finds; a crash after it leaves the whole file. Everything here blocks:
call it in a thread. The file system must support hard links.
"""

import errno
import fcntl
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep_storage.pieces import Filled, pieces

_TEMPORARY_PREFIX = ".kvkeep-"
_TEMPORARY_SUFFIX = ".tmp"
# A directory can vanish between making it and using it, when another process deletes the
# last file in it; each lost race costs one round.
_DIRECTORY_RACES = 8


@dataclass(frozen=True, slots=True)
class TemporaryFile:
    """A file that a write left behind, with its size and age."""

    path: Path
    size_bytes: int
    age_seconds: float


def create(path: Path, content: bytes, *, root: Path) -> None:
    """Write a new file durably; it is visible whole or not at all.

    Modifies: ``path``, and directories between ``root`` and it.
    Raises: FileExistsError when ``path`` exists, and changes nothing; OSError.
    """
    with _written_temporary(path, content, root) as temporary:
        try:
            # A link fails when the name is taken, where a rename would overwrite it.
            os.link(temporary, path)
        finally:
            os.unlink(temporary)
    _sync_directories(path.parent, root)


def replace(path: Path, content: bytes, *, root: Path) -> None:
    """Write a file durably over whatever is there; readers see the old or the new one, whole.

    Modifies: ``path``, and directories between ``root`` and it. Raises: OSError.
    """
    with _written_temporary(path, content, root) as temporary:
        try:
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    _sync_directories(path.parent, root)


def delete(path: Path, *, root: Path) -> None:
    """Remove a file and the directories above it that are empty then; none there is success.

    Directories alone are what a write leaves that found no space. The removal is on disk when
    this returns. Modifies: ``path`` and its parents below ``root``. Raises: OSError.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    # When somebody else removed the emptied directory meanwhile, the file went with it.
    with suppress(FileNotFoundError):
        _sync_directory(path.parent)
    for directory in path.parents:
        if directory == root or not _remove_if_empty(directory):
            return


def read_scattered(
    path: Path, into: Sequence[memoryview], offset: int, on_filled: Filled | None = None
) -> None:
    """Fill buffers of bytes, one after the other, from ``offset`` on.

    Reads, and does not map, the file: of a file that is cut short meanwhile, a read is an
    error and a mapped page is a SIGBUS. Modifies: ``into``; ``on_filled`` hears of each piece.
    Raises: EOFError when the file ends before that; OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_descriptor(descriptor, into, offset, on_filled)
    finally:
        os.close(descriptor)


def read_descriptor(
    descriptor: int, into: Sequence[memoryview], offset: int, on_filled: Filled | None = None
) -> None:
    """As ``read_scattered``, from a file that is open. Raises: EOFError, OSError."""
    for piece in pieces(into):
        size_bytes = sum(map(len, piece))
        count = os.preadv(descriptor, piece, offset)
        if count < size_bytes:
            _read_rest(descriptor, piece, offset, count)
        if on_filled is not None:
            on_filled(offset, piece)
        offset += size_bytes


def _read_rest(descriptor: int, piece: Sequence[memoryview], offset: int, count: int) -> None:
    """Go on with a piece of which ``count`` bytes were read, the last time."""
    rest = deque(piece)
    while True:
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}")
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if not rest:
            return
        rest[0] = rest[0][count:]
        count = os.preadv(descriptor, list(rest), offset)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its name, at once, without syncing anything.

    For copies that are verified at every use and can be had again: a power loss may take them
    or leave them damaged. Modifies: ``path``, whatever is there. Raises: OSError.
    """
    os.replace(temporary, path)


def temporary_files(root: Path) -> Iterator[TemporaryFile]:
    """Find every temporary file below ``root`` that a write has left and no write still uses.

    A write that has made its file and not locked it yet, a matter of microseconds, is found.
    """
    now = time.time()
    for directory, _, names in os.walk(root):
        for name in filter(is_temporary, names):
            path = Path(directory, name)
            # The write it belongs to may end between the listing and this look.
            with suppress(FileNotFoundError):
                if _is_locked(path):
                    continue
                status = path.stat()
                yield TemporaryFile(path, status.st_size, now - status.st_mtime)


def is_temporary(name: str) -> bool:
    """Whether a file name is one that only unfinished writes have."""
    return name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX)


@contextmanager
def _written_temporary(path: Path, content: bytes, root: Path) -> Iterator[Path]:
    """Write and sync a temporary file beside ``path``; on failure nothing is left of it.

    It is locked for the length of the ``with`` block, so that nobody takes it for a leftover.
    """
    temporary = path.with_name(f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}{_TEMPORARY_SUFFIX}")
    descriptor = _open_new(temporary, root)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _write_all(descriptor, content)
            os.fsync(descriptor)
        except BaseException:
            os.unlink(temporary)
            raise
        yield temporary
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    if (written := os.fstat(descriptor).st_size) != len(content):
        raise OSError(f"{written} of {len(content)} bytes arrived in the file")


def _open_new(path: Path, root: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(_DIRECTORY_RACES):
        # Never makes the root itself: a store that has vanished must not come back empty.
        if not root.is_dir():
            break
        # Both are what a directory that vanishes half-way through looks like.
        with suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            return os.open(path, flags, 0o640)
    raise OSError(errno.ESTALE, "directory has vanished", str(path.parent))


def _sync_directories(directory: Path, root: Path) -> None:
    """Sync a directory and all above it up to ``root``.

    All of them, because another process may have made one and not synced it yet; a sync of an
    unchanged directory costs next to nothing.
    """
    _sync_directory(directory)
    while directory != root:
        directory = directory.parent
        _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        # In use, or in use again.
        return False
    return True
