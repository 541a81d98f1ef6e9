"""What has to be done from time to time: sweeping, reconciling, forgetting and reclaiming."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from kvkeep_service.forgetting import forget_conversations, forget_deleted
from kvkeep_service.ports import Worker
from kvkeep_service.stores import Stores
from kvkeep_service.telemetry import where
from kvkeep_storage.errors import StorageError
from kvkeep_storage.sweeper import Sweeper

_log = structlog.get_logger(__name__)

_RECONCILE_SECONDS = 15.0
# How long after a deletion by another process its bytes may still be in memory, or on the disk;
# and after a failover has undone one, its record in Redis.
_FORGET_SECONDS = 5.0


class Upkeep:
    """Loops on the event loop; trouble in a round is logged and the next round tries again."""

    def __init__(
        self,
        stores: Stores,
        sweeper: Sweeper,
        worker: Worker,
        repeat_deletions: Callable[[], Awaitable[None]],
        *,
        interval_seconds: float,
    ) -> None:
        """``interval_seconds`` between two sweeps; the other intervals are fixed.

        ``repeat_deletions`` deletes again what Redis has forgotten to be deleted.
        """
        self._stores = stores
        self._sweeper = sweeper
        self._worker = worker
        self._repeat_deletions = repeat_deletions
        self._interval_seconds = interval_seconds
        self._tasks: list[asyncio.Task[None]] = []
        # What this process has removed since its start, by the fields of a sweep's report.
        self.swept: Counter[str] = Counter(
            expired=0, orphan_generations=0, temp_files=0, evicted=0, freed_bytes=0
        )

    def start(self) -> None:
        """Begin every loop, with a first round of each now."""
        rounds = [
            _for_ever("sweep", self._sweep, self._interval_seconds),
            _for_ever("reconcile", self._reconcile, _RECONCILE_SECONDS),
            _for_ever("forget", self._forget, _FORGET_SECONDS),
            _for_ever("repeat_deletions", self._repeat_deletions, _FORGET_SECONDS),
        ]
        if self._stores.disk is not None:
            rounds.append(_for_ever("reclaim", self._stores.disk.reclaim, self._interval_seconds))
        self._tasks = [asyncio.create_task(one) for one in rounds]

    async def stop(self) -> None:
        """End every loop; a sweep cut short is continued by the next one."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        report = await self._sweeper.run_once()
        self.swept.update({name: getattr(report, name) for name in self.swept})
        for tenant, cache_id in report.unreferenced:
            await self._worker.drop(tenant, cache_id)

    async def _reconcile(self) -> None:
        await self._stores.jobs.reconcile(self._stores.metadata)

    async def _forget(self) -> None:
        await forget_conversations(self._stores, self._worker)
        await forget_deleted(self._stores, self._worker)


async def _for_ever(name: str, work: Callable[[], Awaitable[None]], pause_seconds: float) -> None:
    while True:
        try:
            await work()
        except StorageError as error:
            _log.warning(f"{name}_skipped", code=error.code)
        # A loop that ended would be missed by nobody.
        except Exception as error:  # noqa: BLE001
            _log.error(f"{name}_error", where=where(error))
        await asyncio.sleep(pause_seconds)
