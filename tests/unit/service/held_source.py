"""The real object store, whose reads a test watches and may hold back."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from kvkeep_storage.pieces import Filled
from kvkeep_storage.sources import ObjectSource


async def _no_delay() -> None:
    """Reads take as long as they take."""


class Reads:
    """Every read of every load, in order; those that ``holds`` names wait for ``released``."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.read_bytes: dict[str, int] = {}
        self.holds: Callable[[str, int], bool] = lambda name, start: False
        self.delay: Callable[[], Awaitable[None]] = _no_delay
        self.released = asyncio.Event()
        self.held = asyncio.Event()

    async def pass_by(self, key: str, start: int, size_bytes: int) -> None:
        name = key.rpartition("/")[2]
        self.begun.append((name, start))
        await self.delay()
        if self.holds(name, start) and not self.released.is_set():
            self.held.set()
            await self.released.wait()
        self.read_bytes[name] = self.read_bytes.get(name, 0) + size_bytes


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Let every load from now on go through the returned watch."""
    reads = Reads()

    class HeldSource(ObjectSource):
        async def read_ranges(
            self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
        ) -> None:
            await reads.pass_by(key, start, sum(len(piece) for piece in into))
            await super().read_ranges(key, start, into, on_filled)

    monkeypatch.setattr("kvkeep_service.stores.ObjectSource", HeldSource)
    return reads
