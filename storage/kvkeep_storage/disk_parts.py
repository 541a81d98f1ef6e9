"""Files in the making on the disk tier: locked by whoever fills them, whatever process that is.

A part stands beside the file it becomes. It belongs to the holder of its lock: nobody else
renames or removes it. The lock ends with the process, so a part without one is a leftover, which
the next filler, or a reclaim, takes over. Everything here blocks.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_SUFFIX: Final = ".part"


class Descriptor:
    """An open file, closed as soon as nothing refers to it.

    So a thread that still reads or writes, though its caller was cancelled, never meets the
    number of a file that was opened later.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        """Own an open descriptor."""
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


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
        if held is not None:
            # While its lock is held, nobody else can have come to own it.
            os.unlink(part)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return held is not None


def is_open_at(path: Path, descriptor: Descriptor) -> bool:
    """Whether a path still names the file that was opened. Raises: OSError."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor.number), path.stat())
    return False


def _locked(part: Path, flags: int) -> Descriptor | None:
    """None when the part was renamed or removed before the lock was had."""
    descriptor = Descriptor(os.open(part, flags | os.O_CLOEXEC, 0o600))
    fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor if is_open_at(part, descriptor) else None
