"""A synthetic cache, and what moving its bytes costs without kvkeep: the other side of store.py."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvkeep_bench.samples import Samples
from kvkeep_kernels.remainder import CLUSTERS
from kvkeep_storage.artifact import CacheRows, LayerRows, RowBytes
from kvkeep_storage.part_digests import RangeDigests
from kvkeep_storage.range_plan import RANGE_BYTES
from kvkeep_storage.reading import PARALLEL_READS
from kvkeep_storage.spare_memory import Room, new_room

Content = TypeVar("Content")

# Eight-billion-parameter shape, and the cuts of an artifact that was built at 0.3.
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3)
# A commit writes two slabs at a time.
_PARALLEL_WRITES = 2
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a file or object."""

    name: str
    start: int
    size_bytes: int


def synthetic_rows(mebibytes: int) -> CacheRows:
    """About so many MiB of bfloat16 rows, with heads of very different lengths."""
    rng = np.random.default_rng(7)
    row_bytes = 2 * HEAD_DIM * 2
    mean = mebibytes * _MIB / (NUM_LAYERS * NUM_KV_HEADS * row_bytes)
    share = np.diff([0.0, *RATIOS]) / RATIOS[-1]
    spread = rng.uniform(0.5, 1.5, (len(RATIOS), NUM_LAYERS, NUM_KV_HEADS))
    counts = (share[:, None, None] * mean * spread).astype(np.int32)
    layers, remainders = [], len(RATIOS) * 2 * NUM_KV_HEADS * CLUSTERS
    for rows in counts.sum(axis=(0, 2)).tolist():
        k, v = (_finite_numbers(rng, rows) for _ in "kv")
        remainder = _finite_numbers(rng, remainders).reshape(len(RATIOS), 2, NUM_KV_HEADS, -1)
        positions = np.arange(rows, dtype=np.int32)
        layers.append(LayerRows(k, v, positions, remainder=remainder))
    protected = np.zeros((NUM_LAYERS, NUM_KV_HEADS), np.int32)
    return CacheRows("bfloat16", NUM_KV_HEADS, HEAD_DIM, RATIOS, counts, protected, tuple(layers))


def ranges_of(sizes: dict[str, int]) -> list[Range]:
    """The same ranges as a load cuts: of 8 to 16 MiB."""
    return [
        Range(name, start, min(step, size_bytes - start))
        for name, size_bytes in sizes.items()
        for step in [-(-size_bytes // max(1, size_bytes // RANGE_BYTES))]
        for start in range(0, size_bytes, step)
    ]


def read_files(ranges: Sequence[Range], room_for: Room = new_room) -> RowBytes:
    """Read ranges of files into one buffer, as many at once as a load has on their way."""
    starts = [0, *accumulate(part.size_bytes for part in ranges)]
    into = room_for(starts[-1])

    def read(part: Range, start: int) -> None:
        here = into[start : start + part.size_bytes]
        descriptor = os.open(part.name, os.O_RDONLY)
        try:
            done = 0
            while done < part.size_bytes:
                done += os.preadv(descriptor, [here[done:].data], part.start + done)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(PARALLEL_READS) as threads:
        list(threads.map(read, ranges, starts))
    return into


async def get_together(
    get: Callable[[Range], Awaitable[Content]], ranges: Sequence[Range]
) -> list[Content]:
    """Get ranges of objects, as many at once as a load does, and do nothing with them."""
    free = asyncio.Semaphore(PARALLEL_READS)

    async def get_one(part: Range) -> Content:
        async with free:
            return await get(part)

    return await asyncio.gather(*map(get_one, ranges))


def write_files(folder: Path, contents: Sequence[bytes]) -> None:
    """Write and sync files, as many at once as a commit does."""

    def write(numbered: tuple[int, bytes]) -> None:
        number, content = numbered
        with (folder / str(number)).open("wb", buffering=0) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    with ThreadPoolExecutor(_PARALLEL_WRITES) as threads:
        list(threads.map(write, enumerate(contents)))


class DigestClock:
    """The CPU seconds that digesting rows takes, in all threads together, while it is on.

    All of it, not the hashing alone: finding out whose bytes a piece holds as well.
    """

    def __init__(self) -> None:
        """Off, at zero."""
        self.seconds = 0.0
        self._mutex = threading.Lock()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let every digest be timed meanwhile."""
        real = RangeDigests.filled

        def timed(digests: RangeDigests, offset: int, views: Sequence[memoryview]) -> None:
            started = time.thread_time()
            real(digests, offset, views)
            taken = time.thread_time() - started
            with self._mutex:
                self.seconds += taken

        # There is no other door: a load offers none, and need not for this.
        RangeDigests.filled = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            RangeDigests.filled = real  # type: ignore[method-assign]


def repeated(samples: Samples, repeats: int) -> Iterator[Samples]:
    """Give ``samples`` as often as asked, after one that is thrown away: a warm-up."""
    yield Samples()
    for _ in range(repeats):
        yield samples


def _finite_numbers(rng: np.random.Generator, rows: int) -> RowBytes:
    numbers = rng.integers(0, 0x3F80, (rows, HEAD_DIM), dtype=np.uint16)
    return numbers.view(np.uint8)
