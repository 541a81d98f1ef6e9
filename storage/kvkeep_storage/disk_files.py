"""The files of the disk tier: whole objects of one store, under the keys they have there.

Nothing is synced: a copy is verified by its digests at every load, so one that a power loss has
damaged is found out, forgotten and fetched again. A file is never changed once it has its name,
and objects never change at all, so a copy is never out of date. Everything here blocks.
"""

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvkeep_storage import durable, keys
from kvkeep_storage.disk_budget import STORE_PREFIX, DiskBudget
from kvkeep_storage.disk_parts import Descriptor, is_open_at, is_part, lock_part, part_of
from kvkeep_storage.errors import Invalid
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.pieces import Filled
from kvkeep_storage.records import check_name

# A directory can vanish between making it and using it; each lost race costs one round.
_DIRECTORY_RACES: Final = 8
# Copies of another store, such as one this directory was used for before.
_FOREIGN_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Part:
    """A file that this process fills, and that is its alone until ``descriptor`` is closed."""

    path: Path
    descriptor: Descriptor
    size_bytes: int

    def write(self, content: memoryview, offset: int) -> None:
        """Write all of ``content``. Raises: OSError."""
        with self.descriptor.used() as number:
            while content:
                count = os.pwrite(number, content, offset)
                content, offset = content[count:], offset + count

    def read(self, into: Sequence[memoryview], offset: int, on_filled: Filled | None) -> bool:
        """Read what was written before; False when the part is closed.

        Modifies: ``into``. Raises: EOFError, OSError.
        """
        try:
            with self.descriptor.used() as number:
                durable.read_descriptor(number, into, offset, on_filled)
        except OSError as error:
            if error.errno == errno.EBADF:
                return False
            raise
        return True


class DiskFiles:
    """Copies of the objects of one store below ``root``, which other stores may share.

    Safe for threads, and beside other processes that use the directory. Every method raises
    OSError when the disk fails.
    """

    def __init__(self, root: Path, store_id: str, budget: DiskBudget) -> None:
        """Raises: Invalid for a store id that cannot stand in a path."""
        check_name("store_id", store_id)
        self._root = root
        self._folder = f"{STORE_PREFIX}{store_id}"
        self._budget = budget

    def size(self, key: str) -> int | None:
        """Size of a copy in bytes; None when there is none."""
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError:
            return None

    def content(self, key: str) -> bytes | None:
        """A whole copy; None when there is none."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            # Every process sees by this when the file was last used.
            os.utime(path)
        except FileNotFoundError:
            return None
        return content

    def read(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None
    ) -> bool:
        """Fill buffers from a copy; False when there is none, and then nothing was written.

        Modifies: ``into``. Raises: EOFError when the copy ends too early.
        """
        path = self._path(key)
        try:
            durable.read_scattered(path, into, start, on_filled)
        except FileNotFoundError:
            return False
        with suppress(FileNotFoundError):
            os.utime(path)
        return True

    def has_slabs(self, prefix: str) -> bool:
        """Whether any slab of a generation is here."""
        with suppress(FileNotFoundError):
            return any(
                not is_part(path) and path.name != keys.MANIFEST
                for path in self._path(prefix).iterdir()
            )
        return False

    def begin(self, key: str, size_bytes: int) -> Part | None:
        """Begin a copy; None when there is one already, or no room for one.

        Raises: BlockingIOError while somebody fills it.
        """
        path = self._path(key)
        held = self._lock(part_of(path))
        part = Part(path, held, size_bytes)
        try:
            if not path.exists() and self._budget.make(part_of(path), held, size_bytes):
                return part
        except BaseException:
            self.close(part)
            raise
        self.close(part)
        return None

    def progress(self, key: str) -> float:
        """When somebody last wrote to a part, in epoch seconds; 0 when nobody fills one."""
        try:
            return part_of(self._path(key)).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def finish(self, part: Part, cost_seconds: float) -> None:
        """Make a part that is written to its end a copy; ``cost_seconds`` is what it took."""
        self._budget.publish(part.path, cost_seconds)

    def close(self, part: Part) -> None:
        """Close a part, and remove it unless it was finished."""
        try:
            if is_open_at(part_of(part.path), part.descriptor):
                self._budget.remove([part_of(part.path)])
        finally:
            part.descriptor.close()

    def remove(self, prefix: str) -> None:
        """Remove a copy, or every copy below a prefix; parts are their fillers'."""
        found = self._budget.files(f"{self._folder}/{prefix}")
        below = [file.path for file in found if not is_part(file.path)]
        self._budget.remove([self._path(prefix)] if self._path(prefix).is_file() else below)

    def generations(self) -> list[GenerationKey]:
        """Every generation of which something is here, parts included."""
        found = []
        caches = self._path(keys.CACHES)
        for path in caches.glob("*/*/*"):
            with suppress(Invalid):
                found.append(GenerationKey(*path.relative_to(caches).parts))
        return found

    def reclaim(self) -> None:
        """Remove what crashes and other stores have left, and count what is here anew."""
        oldest = time.time() - _FOREIGN_SECONDS
        ours = self._root / self._folder
        foreign = [
            file.path
            for file in self._budget.files()
            if ours not in file.path.parents and file.used_at < oldest and not is_part(file.path)
        ]
        self._budget.remove(foreign)
        self._budget.recount()

    def _lock(self, part: Path) -> Descriptor:
        for _ in range(_DIRECTORY_RACES - 1):
            with suppress(FileNotFoundError, FileExistsError):
                part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                return lock_part(part)
        part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return lock_part(part)

    def _path(self, key: str) -> Path:
        return self._root / self._folder / key
