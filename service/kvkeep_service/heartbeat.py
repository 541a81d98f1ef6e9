"""Showing that a build is alive: its lease and its job renewed, its progress written."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from kvkeep_service.engine.build import Progress
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import LeaseLost, StorageError
from kvkeep_storage.jobs import Job
from kvkeep_storage.records import BuildLease

_log = structlog.get_logger(__name__)

_PROGRESS_SECONDS = 0.25


class ContextDeleted(Exception):
    """The context of a running build is gone."""


class Heartbeat:
    """Beats in the background for as long as one block of one task runs; used once.

    What the beats lose, the block has lost: it is cancelled, and ends with that error.
    """

    def __init__(self, stores: Stores, job: Job, lease: BuildLease) -> None:
        """Both ``job`` and ``lease`` are held now."""
        self._stores = stores
        self._job = job
        self._lease = lease
        self._latest: Progress | None = None
        self._lost: Exception | None = None
        self._is_over = False

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[Callable[[Progress], None]]:
        """Keep lease and job while the block runs, and write the progress it reports.

        Raises: LeaseLost when either is lost; ContextDeleted. A cancellation from elsewhere
            stays one, even when something is lost at the same moment.
        """
        block = asyncio.current_task()
        assert block is not None
        cancellations = block.cancelling()
        beats = asyncio.create_task(self._beat(block))
        try:
            yield self._report
        finally:
            # From here on nobody may cancel this task for the sake of the block.
            self._is_over = True
            beats.cancel()
            await asyncio.wait([beats])
            if self._lost is not None and block.uncancel() <= cancellations:
                raise self._lost from None

    def _report(self, progress: Progress) -> None:
        self._latest = progress

    async def _beat(self, block: asyncio.Task[object]) -> None:
        try:
            await self._beat_for_ever()
        # Whatever ends the beats ends the build, before its lease runs out under it.
        except Exception as error:  # noqa: BLE001
            if not self._is_over:
                self._lost = error
                block.cancel()

    async def _beat_for_ever(self) -> None:
        stores, beat_at, is_missed = self._stores, 0.0, False
        while True:
            try:
                if time.monotonic() >= beat_at:
                    await stores.leases.renew(self._lease)
                    await stores.jobs.heartbeat(self._job, self._job.owner)
                    beat_at = time.monotonic() + stores.jobs.heartbeat_seconds
                await self._show()
                is_missed = False
            except LeaseLost:
                raise
            except StorageError as error:
                # Redis may come back before the lease runs out; if not, the commit is refused.
                if not is_missed:
                    _log.warning("heartbeat_missed", context=self._job.context_id, code=error.code)
                is_missed = True
            await asyncio.sleep(_PROGRESS_SECONDS)

    async def _show(self) -> None:
        """Write the latest progress. Raises: ContextDeleted when there is nothing to write to."""
        if self._latest is None:
            return
        progress, self._latest = self._latest, None
        metadata, job = self._stores.metadata, self._job
        shown = await metadata.progress(
            job.tenant, job.context_id, progress.stage, progress.fraction
        )
        if not shown and await metadata.context(job.tenant, job.context_id) is None:
            raise ContextDeleted
