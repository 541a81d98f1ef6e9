"""Who has memory of the engine's device besides caches: builds, and the tails of answers.

Belongs to the event loop, as everything of residency does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from kvkeep_service.errors import MemoryShort

UNBOUNDED: Final = 2**62


class BuildTooLarge(Exception):
    """A build needs more than there is for everything, in bytes."""

    def __init__(self, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"building it needs {needed_bytes} bytes of memory; KVKEEP_MEMORY_BYTES allows"
            f" {limit_bytes}"
        )


class Reservations:
    """One bound for caches, builds and tails together. Caches that are idle have what is left.

    Where caches in use leave no room, answers are refused and builds wait. A lone answer is let
    in whatever it needs, as the cache it asks for is.
    """

    def __init__(
        self, size_bytes: int, caches_in_use: Callable[[], int], on_reserved: Callable[[], None]
    ) -> None:
        """``caches_in_use``: bytes of caches that cannot be given up now.

        ``on_reserved`` is called when caches have less than before.
        """
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._caches_in_use = caches_in_use
        self._on_reserved = on_reserved
        self._freed = asyncio.Event()

    @property
    def left_for_caches(self) -> int:
        """Bytes that caches may have."""
        return max(0, self.size_bytes - self.held_bytes)

    @contextmanager
    def for_answer(self, size_bytes: int) -> Iterator[None]:
        """Have what an answer's tail may grow to. Raises: MemoryShort."""
        if self.held_bytes and not self._has_room_for(size_bytes):
            raise MemoryShort("there is no memory for one more answer now")
        with self._held(size_bytes):
            yield

    @asynccontextmanager
    async def for_build(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait until a build fits, and have what it needs.

        Raises: BuildTooLarge, when it would not fit with nothing else in memory.
        """
        if size_bytes > self.size_bytes:
            raise BuildTooLarge(size_bytes, self.size_bytes)
        while not self._has_room_for(size_bytes):
            self._freed.clear()
            await self._freed.wait()
        with self._held(size_bytes):
            yield

    def withhold(self, size_bytes: int) -> None:
        """Take bytes out of the bound for the engine's own use; below 0, put them back."""
        self.size_bytes -= size_bytes
        self._on_reserved()
        self.freed()

    def freed(self) -> None:
        """A cache is no longer in use: let those look again who wait."""
        self._freed.set()

    def _has_room_for(self, size_bytes: int) -> bool:
        return self.held_bytes + self._caches_in_use() + size_bytes <= self.size_bytes

    @contextmanager
    def _held(self, size_bytes: int) -> Iterator[None]:
        self.held_bytes += size_bytes
        self._on_reserved()
        try:
            yield
        finally:
            self.held_bytes -= size_bytes
            self.freed()
