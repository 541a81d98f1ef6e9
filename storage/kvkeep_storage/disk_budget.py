"""The byte budget of a directory that several processes fill at once.

    DIR/usage                                      locked while files are made or evicted; says
                                                   how many bytes the files take, or more
    DIR/store-{store id}/{key of the object}       a whole object
    DIR/store-{store id}/{key of the object}.part  one that is being filled, locked by its filler

The files are the truth and ``usage`` is a hint that is never too low: whoever makes a file adds
its bytes first, and whoever finds too little room counts the files anew. When a file was last
used is its modification time, which every process sees; what it costs to bring back is known to
the process that brought it, and estimated by the others. Everything here blocks.
"""

import fcntl
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvkeep_storage import durable
from kvkeep_storage.disk_parts import Descriptor, is_part, part_of, reclaim_part
from kvkeep_storage.lru import CostAwareLru

STORE_PREFIX: Final = "store-"

# What was read so lately is taken to be in use by a load, which reads each file many times.
_IN_USE_SECONDS: Final = 5.0
# For a file that another process brought: a round trip, and then this rate.
_ESTIMATED_SECONDS: Final = 0.05
_ESTIMATED_BYTES_PER_SECOND: Final = 100e6
# The lock is held for as long as a walk of the directory takes, unless its holder is stopped.
_LOCK_SECONDS: Final = 5.0
_LOCK_POLL_SECONDS: Final = 0.002


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A file of the tier; ``used_at`` is in epoch seconds."""

    path: Path
    size_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """What the directory held when it was last looked at, and what this process evicted."""

    entries: int
    size_bytes: int
    evictions: int


class DiskBudget:
    """Counts and evicts the files of one directory. Safe for threads, and beside processes."""

    def __init__(self, root: Path, budget_bytes: int) -> None:
        """``root`` exists. Raises: Invalid for a negative budget."""
        self._root = root
        self._lru: CostAwareLru[Path] = CostAwareLru(budget_bytes)
        self._used_at: dict[Path, float] = {}
        self._costs: dict[Path, float] = {}
        self._evictions = 0
        self._mutex = threading.Lock()

    def make(self, path: Path, part: Descriptor, size_bytes: int) -> bool:
        """Give a locked part its size, if need be by evicting others.

        False, and nothing evicted, when it does not fit beside what is in use.
        Raises: OSError.
        """
        with part.used() as number, self._locked() as usage:
            # Whatever a crash has left in it was counted before.
            os.ftruncate(number, 0)
            counted_bytes = _read_number(usage)
            if counted_bytes is None or counted_bytes + size_bytes > self._lru.budget_bytes:
                counted_bytes = self._recount()
                victims = self._victims(size_bytes)
                if victims is None:
                    _write_number(usage, counted_bytes)
                    return False
                for victim in victims:
                    counted_bytes -= self._evict(victim)
            _write_number(usage, counted_bytes + size_bytes)
            os.ftruncate(number, size_bytes)
            self._note(DiskFile(path, size_bytes, time.time()))
            return True

    def publish(self, path: Path, cost_seconds: float) -> None:
        """Give a part that is whole its name, and remember what it took to bring it.

        Under the lock as well, or a walk might see it under neither name. Raises: OSError.
        """
        with self._locked():
            durable.publish(part_of(path), path)
            self._costs[path] = _without_noise(cost_seconds)
            self._forget(part_of(path))
            self._note(_looked_at(path))

    def remove(self, paths: list[Path]) -> None:
        """Remove files whatever they are worth; missing ones are ignored. Raises: OSError."""
        with self._mutex:
            for path in paths:
                self._forget(path)
                self._unlink(path)

    def recount(self) -> None:
        """Look at every file, correct what ``usage`` says, and remove empty directories.

        Raises: OSError.
        """
        with self._locked() as usage:
            _write_number(usage, self._recount())
        for store in _names(self._root, STORE_PREFIX):
            for directory, _, names in os.walk(self._root / store, topdown=False):
                if not names:
                    _remove_if_empty(Path(directory))

    def usage(self) -> DiskUsage:
        """As of the last look, without looking and without waiting."""
        return DiskUsage(len(self._lru), self._lru.size_bytes, self._evictions)

    def files(self, folder: str = "") -> Iterator[DiskFile]:
        """Every file below a folder of the directory that is the tier's own."""
        stores = [folder] if folder else _names(self._root, STORE_PREFIX)
        for store in stores:
            for directory, _, names in os.walk(self._root / store):
                for name in names:
                    with suppress(FileNotFoundError):
                        yield _looked_at(Path(directory, name))

    def _recount(self) -> int:
        """Bring the books in line with the files; return the bytes of all of them.

        Parts that nobody fills any more are removed.
        """
        found = {file.path: file for file in self.files()}
        for path in [path for path in found if is_part(path)]:
            if reclaim_part(path):
                del found[path]
        for path in [path for path in self._lru if path not in found]:
            self._forget(path)
        # In the order of use, so that the books rank them as if they had seen each.
        for file in sorted(found.values(), key=lambda file: file.used_at):
            if file.used_at != self._used_at.get(file.path):
                self._note(file)
        return self._lru.size_bytes

    def _victims(self, needed_bytes: int) -> list[Path] | None:
        """What to evict; None when that does not make enough room."""
        recently = time.time() - _IN_USE_SECONDS
        in_use = [path for path in self._lru if self._used_at[path] > recently or is_part(path)]
        for path in in_use:
            self._lru.pin(path)
        try:
            return self._lru.victims(needed_bytes) if self._fits(in_use, needed_bytes) else None
        finally:
            for path in in_use:
                self._lru.unpin(path)

    def _fits(self, in_use: list[Path], needed_bytes: int) -> bool:
        kept_bytes = sum(self._lru.size_of(path) for path in in_use)
        return kept_bytes + needed_bytes <= self._lru.budget_bytes

    def _evict(self, path: Path) -> int:
        size_bytes = self._lru.size_of(path)
        # Whoever has it open reads on; whoever opens it next finds it missing.
        self._unlink(path)
        self._lru.evict(path)
        self._forget(path)
        self._evictions += 1
        return size_bytes

    def _note(self, file: DiskFile) -> None:
        estimate = _ESTIMATED_SECONDS + file.size_bytes / _ESTIMATED_BYTES_PER_SECOND
        cost_seconds = self._costs.get(file.path, _without_noise(estimate))
        self._lru.put(file.path, file.size_bytes, cost_seconds)
        self._used_at[file.path] = file.used_at

    def _forget(self, path: Path) -> None:
        self._lru.remove(path)
        self._used_at.pop(path, None)
        self._costs.pop(path, None)

    def _unlink(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        for directory in path.parents:
            if directory == self._root or not _remove_if_empty(directory):
                return

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the directory; give the descriptor of ``usage``.

        Raises: BlockingIOError when another process does not let go of it.
        """
        with self._mutex:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            # It may be removed as a whole, under a running process as well.
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._root / "usage", flags, 0o600)
            try:
                deadline = time.monotonic() + _LOCK_SECONDS
                while True:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > deadline:
                            raise
                        time.sleep(_LOCK_POLL_SECONDS)
                yield descriptor
            finally:
                os.close(descriptor)


def _without_noise(seconds: float) -> float:
    """A power of two: what else went on at the time must not decide what stays."""
    return 2.0 ** round(math.log2(seconds)) if seconds > 0 else 0.0


def _looked_at(path: Path) -> DiskFile:
    status = path.stat()
    return DiskFile(path, status.st_size, status.st_mtime)


def _names(root: Path, prefix: str) -> list[str]:
    with suppress(FileNotFoundError):
        return [entry.name for entry in os.scandir(root) if entry.name.startswith(prefix)]
    return []


def _read_number(descriptor: int) -> int | None:
    """What ``usage`` says; None when it is new, or says nothing."""
    try:
        return int(os.pread(descriptor, 32, 0))
    except ValueError:
        return None


def _write_number(descriptor: int, number: int) -> None:
    # Of one length, so that it is replaced whole.
    os.pwrite(descriptor, f"{number:020d}\n".encode(), 0)


def _remove_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:
        # In use again, or already gone: either way it is not ours to remove.
        return False
    return True
