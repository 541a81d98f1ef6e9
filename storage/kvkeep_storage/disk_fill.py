"""One object on its way from the store to the disk tier, read by many as it arrives."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import monotonic, perf_counter
from typing import Final, Protocol, TypeVar

import numpy as np

from kvkeep_storage.artifact import RowBytes
from kvkeep_storage.concurrency import run_together
from kvkeep_storage.disk_files import DiskFiles, Part
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled, scatter

Result = TypeVar("Result")

CHUNK_BYTES: Final = 8 * 2**20
# Of one fill, so that others get their turn; what is written counts too.
_CHUNKS_AT_ONCE: Final = 16
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What all fills of a tier share: chunks asked of the store at once, and held in memory.

    More are held than are asked for, so that a disk which writes slowly for a while does not
    hold up the load.
    """

    requests: asyncio.Semaphore
    chunks: asyncio.Semaphore


class Fill:
    """Fetches an object once, chunk by chunk in rising order, for this and other processes."""

    def __init__(
        self,
        objects: Objects,
        files: DiskFiles,
        key: str,
        *,
        in_thread: InThread,
        limits: Limits,
        fetched: Traffic,
    ) -> None:
        """Nothing happens before ``run``. ``fetched`` is counted up."""
        self._objects = objects
        self._files = files
        self._key = key
        self._in_thread = in_thread
        self._limits = limits
        self._fetched = fetched
        self._part: Part | None = None
        self._begun = asyncio.Event()
        self._arrivals: list[asyncio.Event] = []
        self._in_memory: dict[int, RowBytes] = {}
        self._on_disk: set[int] = set()
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

    async def read(self, start: int, into: Sequence[memoryview], on_filled: Filled | None) -> bool:
        """Fill buffers as soon as their bytes are here; False when they do not come this way.

        Modifies: ``into``, unless it returns False. Raises: OSError.
        """
        await self._begun.wait()
        part = self._part
        end = start + sum(len(view) for view in into)
        if part is None or end > part.size_bytes:
            return False
        for index, found in groupby(_in_chunks(start, into), key=lambda place: place.chunk):
            await self._arrivals[index].wait()
            if not await self._read_chunk(part, index, list(found), on_filled):
                return False
        return True

    async def _read_chunk(
        self, part: Part, index: int, places: "list[_Place]", on_filled: Filled | None
    ) -> bool:
        start, into = places[0].start, [place.view for place in places]
        if (chunk := self._in_memory.get(index)) is not None:
            # Not among those that wait for the disk.
            content = chunk[start - index * CHUNK_BYTES :].data
            await asyncio.to_thread(scatter, content, into, start, on_filled)
            return True
        if index not in self._on_disk:
            return False
        return await self._in_thread(part.read, into, start, on_filled)

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
        async with self._limits.chunks:
            async with self._limits.requests:
                # Memory of its own for each: a read given up may still write to it.
                chunk = np.empty(min(CHUNK_BYTES, part.size_bytes - start), np.uint8)
                started = perf_counter()
                await self._objects.read_ranges(self._key, start, [chunk.data])
                self._fetched.add(len(chunk), perf_counter() - started)
            # Readers have it from here, and need not wait for the disk.
            self._in_memory[index] = chunk
            self._arrivals[index].set()
            try:
                await self._in_thread(part.write, chunk.data, start)
                self._on_disk.add(index)
            finally:
                del self._in_memory[index]

    async def _finish(self, part: Part, cost_seconds: float) -> None:
        if self._dropped.is_set():
            return
        await self._in_thread(self._files.finish, part, cost_seconds)
        # Dropped while it got its name.
        if self._dropped.is_set():
            await self._in_thread(self._files.remove, self._key)


@dataclass(frozen=True, slots=True)
class _Place:
    """A view that one chunk fills, from byte ``start`` of the object on."""

    chunk: int
    start: int
    view: memoryview


def _in_chunks(start: int, into: Sequence[memoryview]) -> Iterator[_Place]:
    """Cut buffers where chunks end."""
    for buffer in into:
        rest = buffer
        while rest:
            index, offset = divmod(start, CHUNK_BYTES)
            view = rest[: CHUNK_BYTES - offset]
            yield _Place(index, start, view)
            start, rest = start + len(view), rest[len(view) :]
