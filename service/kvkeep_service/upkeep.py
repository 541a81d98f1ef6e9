"""What has to be done from time to time: sweep, and put forgotten builds back in the queue."""

import asyncio

import structlog

from kvkeep_service.ports import Worker
from kvkeep_service.stores import Stores
from kvkeep_service.telemetry import where
from kvkeep_storage.errors import StorageError
from kvkeep_storage.sweeper import Sweeper

_log = structlog.get_logger(__name__)

_RECONCILE_SECONDS = 15.0


class Upkeep:
    """Two loops on the event loop; trouble in a round is logged and the next round tries again."""

    def __init__(
        self, stores: Stores, sweeper: Sweeper, worker: Worker, *, interval_seconds: float
    ) -> None:
        """``interval_seconds`` between two sweeps; builds are reconciled every 15 seconds."""
        self._stores = stores
        self._sweeper = sweeper
        self._worker = worker
        self._interval_seconds = interval_seconds
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin both loops, with a first round of each now."""
        self._tasks = [
            asyncio.create_task(self._sweep_for_ever()),
            asyncio.create_task(self._reconcile_for_ever()),
        ]

    async def stop(self) -> None:
        """End both loops; a sweep cut short is continued by the next one."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                report = await self._sweeper.run_once()
                for tenant, cache_id in report.unreferenced:
                    await self._worker.drop(tenant, cache_id)
            except StorageError as error:
                _log.warning("sweep_skipped", code=error.code)
            # A loop that ended would be missed by nobody.
            except Exception as error:  # noqa: BLE001
                _log.error("sweep_error", where=where(error))
            await asyncio.sleep(self._interval_seconds)

    async def _reconcile_for_ever(self) -> None:
        while True:
            try:
                await self._stores.jobs.reconcile(self._stores.metadata)
            except StorageError as error:
                _log.warning("reconcile_skipped", code=error.code)
            # As above.
            except Exception as error:  # noqa: BLE001
                _log.error("reconcile_error", where=where(error))
            await asyncio.sleep(_RECONCILE_SECONDS)
