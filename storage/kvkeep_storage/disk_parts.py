"""Files in the making on the disk tier: locked by whoever fills them, whatever process that is.

A part stands beside the file it becomes. It belongs to the holder of its lock: nobody else
renames or removes it. The lock ends with the process, so a part without one is a leftover, which
the next filler, or a reclaim, takes over. Everything here blocks.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_SUFFIX: Final = ".part"


class Descriptor:
    """An open file, closed once it was said to be done with and no thread uses it any more.

    So a thread that still reads or writes, though its caller was cancelled, never meets the
    number of a file that was opened later.
    """

    def __init__(self, number: int) -> None:
        """Own an open descriptor."""
        self._number = number
        self._mutex = threading.Lock()
        self._users = 1
        self._is_open = True

    @contextmanager
    def used(self) -> Iterator[int]:
        """Keep it open meanwhile. Raises: OSError (EBADF) when it is done with."""
        with self._mutex:
            if not self._is_open:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._users += 1
        try:
            yield self._number
        finally:
            self._let_go()

    def close(self) -> None:
        """Be done with it. May be repeated."""
        with self._mutex:
            if not self._is_open:
                return
            self._is_open = False
        self._let_go()

    def __del__(self) -> None:
        # Whoever asked for it was cancelled before it came.
        self.close()

    def _let_go(self) -> None:
        with self._mutex:
            self._users -= 1
            if not self._users:
                os.close(self._number)


def part_of(path: Path) -> Path:
    """Where a file is made."""
    return path.with_name(path.name + _SUFFIX)


def is_part(path: Path) -> bool:
    """Whether a file is in the making, or was left so."""
    return path.name.endswith(_SUFFIX)


def lock_part(part: Path) -> Descriptor:
    """Open a part and lock it; it is made when there is none, and may hold anything.

    Raises: BlockingIOError while somebody fills it; FileNotFoundError when its directory is not
    there; OSError.
    """
    while True:
        held = _locked(part, os.O_RDWR | os.O_CREAT)
        if held is not None:
            return held


def reclaim_part(part: Path) -> bool:
    """Remove a part that nobody fills any more; False when somebody does. Raises: OSError."""
    try:
        held = _locked(part, os.O_RDWR)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    if held is None:
        return False
    try:
        # While its lock is held, nobody else can have come to own it.
        os.unlink(part)
    finally:
        held.close()
    return True


def is_open_at(path: Path, descriptor: Descriptor) -> bool:
    """Whether a path still names the file that was opened. Raises: OSError."""
    with suppress(FileNotFoundError), descriptor.used() as number:
        return os.path.samestat(os.fstat(number), path.stat())
    return False


def _locked(part: Path, flags: int) -> Descriptor | None:
    """None when the part was renamed or removed before the lock was had."""
    descriptor = Descriptor(os.open(part, flags | os.O_CLOEXEC, 0o600))
    try:
        with descriptor.used() as number:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_open_at(part, descriptor):
            return descriptor
    except BaseException:
        descriptor.close()
        raise
    descriptor.close()
    return None
