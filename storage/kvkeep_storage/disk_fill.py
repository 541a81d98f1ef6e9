"""One object on its way from the store to the disk tier, read by many as it arrives."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Final, Protocol, TypeVar

import numpy as np

from kvkeep_storage.concurrency import run_together
from kvkeep_storage.disk_files import DiskFiles, Part
from kvkeep_storage.objects import Objects

Result = TypeVar("Result")

CHUNK_BYTES: Final = 8 * 2**20
_CHUNKS_AT_ONCE: Final = 4
# Another process that fills the same file is waited for while it writes, and not for ever.
_STALLED_SECONDS: Final = 5.0
_WAIT_SECONDS: Final = 60.0
_WAIT_POLL_SECONDS: Final = 0.02


class InThread(Protocol):
    """Runs what blocks on the disk, with a deadline. Raises: OSError, TimeoutError among them."""

    def __call__(self, call: Callable[..., Result], *args: object) -> Awaitable[Result]:
        """Call in a thread."""
        ...


@dataclass(slots=True)
class Traffic:
    """What moved, in bytes and in seconds that add up over everything that moved at once."""

    size_bytes: int = 0
    seconds: float = 0.0

    def add(self, size_bytes: int, seconds: float) -> None:
        """Count one transfer."""
        self.size_bytes += size_bytes
        self.seconds += seconds


class Fill:
    """Fetches an object once, chunk by chunk in rising order, for this and other processes."""

    def __init__(
        self,
        objects: Objects,
        files: DiskFiles,
        key: str,
        *,
        in_thread: InThread,
        requests: asyncio.Semaphore,
        fetched: Traffic,
    ) -> None:
        """``requests`` bounds the chunks in memory at once; ``fetched`` is counted up."""
        self._objects = objects
        self._files = files
        self._key = key
        self._in_thread = in_thread
        self._requests = requests
        self._fetched = fetched
        self._part: Part | None = None
        self._begun = asyncio.Event()
        self._arrivals: list[asyncio.Event] = []
        self._arrived: set[int] = set()
        self._dropped = asyncio.Event()

    def drop(self) -> None:
        """Let nothing of it stay; whoever reads it may read on."""
        self._dropped.set()

    async def run(self, size_bytes: int | None) -> None:
        """Fetch the whole object, unless another process does; then wait for that.

        ``size_bytes`` None asks the store. Modifies: the files, and this.
        Raises: what the store raises; OSError. Whatever happens, every reader is told.
        """
        try:
            if size_bytes is None:
                size_bytes = await self._objects.size(self._key)
            started = perf_counter()
            part = self._part = await self._begin(size_bytes)
            if part is None:
                return
            try:
                starts = range(0, size_bytes, CHUNK_BYTES)
                self._arrivals = [asyncio.Event() for _ in starts]
                self._begun.set()
                await run_together(
                    (self._fetch(part, index) for index in range(len(starts))),
                    limit=_CHUNKS_AT_ONCE,
                )
                await self._finish(part, perf_counter() - started)
            finally:
                await self._in_thread(self._files.close, part)
        finally:
            self._begun.set()
            for arrival in self._arrivals:
                arrival.set()

    async def read(self, start: int, into: Sequence[memoryview]) -> bool:
        """Fill buffers as soon as their bytes are here; False when they do not come this way.

        Modifies: ``into``, unless it returns False. Raises: OSError.
        """
        await self._begun.wait()
        part = self._part
        end = start + sum(len(view) for view in into)
        if part is None or end > part.size_bytes:
            return False
        for index in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            await self._arrivals[index].wait()
            if index not in self._arrived:
                return False
        return await self._in_thread(part.read, into, start)

    async def _begin(self, size_bytes: int) -> Part | None:
        """None when there is no room, or another process has filled it, or hangs in that."""
        deadline = monotonic() + _WAIT_SECONDS
        progress, seen_at = 0.0, monotonic()
        while True:
            try:
                return await self._in_thread(self._files.begin, self._key, size_bytes)
            except BlockingIOError:
                now = monotonic()
                current = await self._in_thread(self._files.progress, self._key)
                if current != progress:
                    progress, seen_at = current, now
                if now > deadline or now - seen_at > _STALLED_SECONDS:
                    return None
            await asyncio.sleep(_WAIT_POLL_SECONDS)

    async def _fetch(self, part: Part, index: int) -> None:
        start = index * CHUNK_BYTES
        async with self._requests:
            # Memory of its own for each: a read that missed its deadline may still write to it.
            chunk = np.empty(min(CHUNK_BYTES, part.size_bytes - start), np.uint8)
            started = perf_counter()
            await self._objects.read_ranges(self._key, start, [chunk.data])
            self._fetched.add(len(chunk), perf_counter() - started)
            await self._in_thread(part.write, chunk.data, start)
        self._arrived.add(index)
        self._arrivals[index].set()

    async def _finish(self, part: Part, cost_seconds: float) -> None:
        if self._dropped.is_set():
            return
        await self._in_thread(self._files.finish, part, cost_seconds)
        # Dropped while it got its name.
        if self._dropped.is_set():
            await self._in_thread(self._files.remove, self._key)
