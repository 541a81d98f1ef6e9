"""A store that counts and holds what is read from it, and the disk tiers in front of it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeAlias

from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled

from .stores import files_below

KEY = GenerationKey("acme", "c" * 64, "gen1")
BUDGET_BYTES = 10**9

OpenTier: TypeAlias = Callable[..., DiskTier]


class CountedObjects(Objects):
    """Counts the reads of each key. While ``gate`` is closed, no range is read past ``free``."""

    reads: Counter[str]
    gate: asyncio.Event
    free_bytes: int

    @classmethod
    def at(cls, root: Path) -> Self:
        return cls.over(f"file://{root}")

    @classmethod
    def over(cls, url: str) -> Self:
        objects = cls.open(url)
        objects.reads = Counter()
        objects.gate = asyncio.Event()
        objects.gate.set()
        objects.free_bytes = 0
        return objects

    async def get(self, key: str) -> bytes:
        self.reads[key] += 1
        return await super().get(key)

    async def size(self, key: str) -> int:
        self.reads[f"size of {key}"] += 1
        return await super().size(key)

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        self.reads[key] += 1
        if start >= self.free_bytes:
            await self.gate.wait()
        await super().read_ranges(key, start, into, on_filled)

    def of_slabs(self) -> int:
        """How many ranges of slabs were read."""
        return sum(count for key, count in self.reads.items() if key.startswith("caches/"))


def content_of(size_bytes: int, seed: int = 1) -> bytes:
    """Bytes of which no two parts are alike."""
    return b"".join((seed * 10**9 + number).to_bytes(8, "big") for number in range(size_bytes // 8))


async def read(tier: DiskTier, key: str, start: int, size_bytes: int) -> bytes:
    """Read a range into buffers of awkward sizes."""
    found = bytearray(size_bytes)
    whole = memoryview(found)
    third = size_bytes // 3
    await tier.read_ranges(key, start, [whole[:third], whole[third:third], whole[third:]])
    return bytes(found)


async def settled(tier: DiskTier) -> None:
    """Return once nothing is being fetched."""
    async with asyncio.timeout(60):
        while tier.stats().filling:  # noqa: ASYNC110  # counts tell nobody when they change
            await asyncio.sleep(0.005)


async def begun(root: Path) -> None:
    """Return once something is being filled."""
    async with asyncio.timeout(60):
        while not copies(root):  # noqa: ASYNC110  # a file tells nobody that it has come
            await asyncio.sleep(0.005)


def copies(root: Path) -> list[Path]:
    """Every file of the tier, parts included, but for its books."""
    return [root / name for name in files_below(root) if name.startswith("store-")]
