"""A local directory as an object store: one file per object, written durably."""

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from kvkeep_storage import durable
from kvkeep_storage.backends import ObjectInfo
from kvkeep_storage.pieces import Filled

_FILES_PER_PAGE = 1000
# Reading what is cached keeps a core busy: of more threads, one waits for another's core and for
# the interpreter, and what it has just read is no longer in the core's cache when it is digested.
_READERS = os.cpu_count() or 1


class LocalBackend:
    """Files below ``root``, read and written in helper threads.

    A thread cannot be interrupted: after a cancellation its operation still goes on.
    """

    is_remote = False

    def __init__(self, root: Path) -> None:
        """``root`` must exist; a store whose directory vanishes is never made anew."""
        self._root = root
        self._readers = ThreadPoolExecutor(_READERS, "kvkeep-read")
        self.location = root.as_uri()

    async def put(self, key: str, content: bytes) -> None:
        """Store an object over whatever is there."""
        await asyncio.to_thread(durable.replace, self._root / key, content, root=self._root)

    async def put_if_absent(self, key: str, content: bytes) -> None:
        """Store an object unless there is one."""
        await asyncio.to_thread(durable.create, self._root / key, content, root=self._root)

    async def get(self, key: str) -> bytes:
        """Read an object whole."""
        return await asyncio.to_thread((self._root / key).read_bytes)

    async def read(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """Fill buffers straight from the file. Modifies: ``into``."""
        path = self._root / key
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._readers, durable.read_scattered, path, into, start, on_filled
        )

    async def size(self, key: str) -> int:
        """Size of an object in bytes."""
        return (await asyncio.to_thread((self._root / key).stat)).st_size

    async def delete(self, key: str) -> None:
        """Remove an object, and the directories that it leaves empty."""
        await asyncio.to_thread(durable.delete, self._root / key, root=self._root)

    async def pages(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """Every object below a directory, a page at a time."""
        found = _files_below(self._root, prefix)
        while page := await asyncio.to_thread(lambda: list(islice(found, _FILES_PER_PAGE))):
            yield page

    async def delete_temporary_files(self, older_than_seconds: float) -> list[int]:
        """Remove what crashed writes left; return the size of each file."""
        return await asyncio.to_thread(_delete_temporary, self._root, older_than_seconds)


def _files_below(root: Path, prefix: str) -> Iterator[ObjectInfo]:
    _require_directory(root)
    for directory, _, names in os.walk(root / prefix, onerror=_raise_unless_missing):
        for name in names:
            if durable.is_temporary(name):
                continue
            path = Path(directory, name)
            try:
                status = path.stat()
            except FileNotFoundError:
                # Deleted since it was listed.
                continue
            key = path.relative_to(root).as_posix()
            yield ObjectInfo(key, status.st_size, status.st_mtime)


def _delete_temporary(root: Path, older_than_seconds: float) -> list[int]:
    removed = []
    for file in durable.temporary_files(root):
        if file.age_seconds >= older_than_seconds:
            durable.delete(file.path, root=root)
            removed.append(file.size_bytes)
    return removed


def _require_directory(root: Path) -> None:
    """An empty store has no objects; one whose disk is not mounted has lost none."""
    if not root.is_dir():
        raise OSError(errno.ESTALE, "directory has vanished", str(root))


def _raise_unless_missing(error: OSError) -> None:
    # A walk passes over what it cannot list, and a caller may delete what it does not see.
    if not isinstance(error, FileNotFoundError):
        raise error
