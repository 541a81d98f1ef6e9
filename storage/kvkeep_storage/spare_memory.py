"""Memory that loads fill: what one cache has given back, the next gets without waiting for it.

The kernel clears new memory before it gives it, which takes as long as reading a cached file into
it, and several times as long where the kernel has to get it from a hypervisor. So what is new is
cleared ahead of those who fill it.
"""

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import numpy as np

from kvkeep_storage.artifact import RowBytes

Room: TypeAlias = Callable[[int], RowBytes]
"""Gives so many bytes of memory, whatever is in them."""

# One large page; what is smaller comes from the process's own heap.
_LARGE_BYTES: Final = 2 * 1024 * 1024
_KEPT_MAX: Final = 4

# Gives every page and changes nothing in any (Linux 5.14, ``asm-generic/mman-common.h``).
_MADV_POPULATE_WRITE: Final = 23
# Whoever maps or unmaps memory in another thread waits for so much to be cleared: 4 ms. Less at a
# time, and as much is lost in waiting for the interpreter.
_CLEARED_AT_ONCE_BYTES: Final = 32 * 1024 * 1024
# Python's own would hold the interpreter meanwhile.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def new_room(size_bytes: int) -> RowBytes:
    """Memory that nobody gives back to anything. Implements ``Room``."""
    return np.empty(size_bytes, np.uint8)


def cleared_ahead(room_for: Room) -> Room:
    """The same memory, which a thread goes through from its first byte on, for the kernel to clear.

    For memory that several threads fill at once: where two of them meet in a new large page, each
    has one cleared. What they write stays, whether the page was gone through before or not.
    """

    def room(size_bytes: int) -> RowBytes:
        made = room_for(size_bytes)
        if size_bytes >= _LARGE_BYTES:
            threading.Thread(
                target=_clear, args=(weakref.ref(made),), name="kvkeep-clear", daemon=True
            ).start()
        return made

    return room


def _clear(memory: "weakref.ref[RowBytes]") -> None:
    """Go through memory for as long as anybody has it.

    Where the kernel cannot do this, or has no more memory, those who write there find out.
    """
    done = 0
    while (room := memory()) is not None and done < room.nbytes:
        start = (room.ctypes.data + done) // mmap.PAGESIZE * mmap.PAGESIZE
        size_bytes = min(_CLEARED_AT_ONCE_BYTES, room.ctypes.data + room.nbytes - start)
        if _madvise(start, size_bytes, _MADV_POPULATE_WRITE):
            return
        done += size_bytes


class SpareMemory:
    """Keeps a few rooms that were given back, which the kernel may take when it is short of memory.

    Until then this process can read in them what was there. Safe for threads.
    """

    def __init__(self) -> None:
        """Nothing is kept yet."""
        # Of two threads, only one gets what a deque gives up; it drops the oldest.
        self._kept: deque[mmap.mmap] = deque(maxlen=_KEPT_MAX)

    def room(self, size_bytes: int) -> RowBytes:
        """Memory for one owner; implements ``Room``.

        It is given back when the last array or view of it is gone. Raises: MemoryError.
        """
        if size_bytes < _LARGE_BYTES:
            return new_room(size_bytes)
        mapped = self._take(size_bytes) or _mapped(size_bytes)
        room = np.frombuffer(mapped, np.uint8, size_bytes)
        # Views of this array keep it, and no shorter way to the memory.
        weakref.finalize(room, self._give_back, mapped).atexit = False
        return room

    def clear(self) -> None:
        """Keep nothing of what was given back: what was there is to be forgotten."""
        self._kept.clear()

    def _take(self, size_bytes: int) -> mmap.mmap | None:
        for _ in range(len(self._kept)):
            try:
                mapped = self._kept.popleft()
            except IndexError:
                break
            if size_bytes <= len(mapped) <= 2 * size_bytes:
                return mapped
            self._kept.append(mapped)
        return None

    def _give_back(self, mapped: mmap.mmap) -> None:
        try:
            mapped.madvise(mmap.MADV_FREE)
        except OSError:
            # Nothing is kept that the kernel could not have when it needs it.
            return
        self._kept.append(mapped)


def _mapped(size_bytes: int) -> mmap.mmap:
    try:
        mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes for a cache") from error
    with suppress(OSError):
        # Small pages take several times as long to get. Some kernels have no large ones.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
