"""Loads of caches that a test begins and ends, and queries that hold them."""

import asyncio

import torch

from kvkeep_kernels.layout import RaggedKV
from kvkeep_service.bringing import Brought, Receiver
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.residency import Pinned, Residency
from kvkeep_service.shelf import CacheKey

ROW_BYTES = 2 * 4 * 4


def a_context(rows: int = 10, ratios: tuple[float, ...] = (0.3,)) -> ResidentContext:
    k = torch.zeros(rows, 4)
    start, length = torch.zeros(1, dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
    return ResidentContext(
        (RaggedKV(k, k.clone(), start, length),),
        torch.tensor([[[rows]], *[[[0]]] * (len(ratios) - 1)], dtype=torch.int32),
        ratios,
        num_tokens=99,
    )


class Store:
    """Loads that begin when asked for, tell what the test says, and end when it says so."""

    def __init__(self) -> None:
        self.calls: list[CacheKey] = []
        self.asked: list[tuple[float, float]] = []
        self.cancelled: list[CacheKey] = []
        self.receivers: list[Receiver] = []
        self.started = asyncio.Event()
        self._results: list[asyncio.Future[Brought]] = []

    async def bring(
        self, key: CacheKey, ratio: float, first_ratio: float, receiver: Receiver
    ) -> Brought:
        result: asyncio.Future[Brought] = asyncio.get_running_loop().create_future()
        self.calls.append(key)
        self.asked.append((ratio, first_ratio))
        self.receivers.append(receiver)
        self._results.append(result)
        self.started.set()
        try:
            return await result
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise

    async def begun(self) -> Receiver:
        """Wait for a load to begin; what it is told comes from the test."""
        await self.started.wait()
        self.started.clear()
        return self.receivers[-1]

    async def finish(self, outcome: ResidentContext | Exception) -> None:
        """End the latest load, once there is one."""
        await self.begun()
        await self.end(outcome)

    async def end(self, outcome: ResidentContext | Exception, number: int = -1) -> None:
        """End a load that has begun, and let it be noticed."""
        if isinstance(outcome, Exception):
            self._results[number].set_exception(outcome)
        else:
            self._results[number].set_result(Brought(outcome, "store", outcome.size_bytes))
        for _ in range(4):
            await asyncio.sleep(0)


class Asker:
    """A query: pins, then holds until it is told to let go."""

    def __init__(
        self,
        residency: Residency,
        key: CacheKey,
        ratio: float = 0.3,
        min_ratio: float | None = None,
    ) -> None:
        self._let_go = asyncio.Event()
        self._pinned: asyncio.Future[Pinned] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._ask(residency, key, ratio, min_ratio))

    async def pinned(self) -> Pinned:
        return await self._pinned

    async def let_go(self) -> None:
        self._let_go.set()
        await self.task

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.task.cancelled()

    async def _ask(
        self, residency: Residency, key: CacheKey, ratio: float, min_ratio: float | None
    ) -> None:
        try:
            async with residency.pinned(key, ratio, min_ratio) as pinned:
                self._pinned.set_result(pinned)
                await self._let_go.wait()
        except Exception as error:  # noqa: BLE001
            self._pinned.set_exception(error)
