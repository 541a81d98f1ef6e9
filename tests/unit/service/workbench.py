"""A builder over real stores and a tiny model that can be held, and what became of its jobs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvkeep_service.bringing import Brought, Receiver
from kvkeep_service.builder import Builder
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.plan import Planner
from kvkeep_service.ports import CompressionSpec, DocumentSpec
from kvkeep_service.recovery import Recovery
from kvkeep_service.registration import Registration
from kvkeep_service.registry import Registry
from kvkeep_service.residency import Residency
from kvkeep_service.sessions import Sessions
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores
from kvkeep_service.worker import LocalWorker
from kvkeep_storage.jobs import Job, Jobs
from kvkeep_storage.load import LoadedCache, load
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import ContextRecord
from kvkeep_storage.redis_keys import BUILDS
from kvkeep_storage.sources import ObjectSource

from ...support.stores import files_below
from .engine.gated import PATIENCE_SECONDS, GatedModel
from .tiny import AT_THIRD, SHORT, gated

TENANT = "acme"


@dataclass(frozen=True, slots=True)
class End:
    """How one claim of a job ended: settled, or given back with or without being counted."""

    how: str
    context_id: str
    attempts: int


class WatchedJobs(Jobs):
    """The real queue, whose settlements a test can wait for. Nothing waits to be claimed again."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(metadata, heartbeat_seconds=0.001, retry_seconds=0)
        self._ends: asyncio.Queue[End] = asyncio.Queue()

    async def ack(self, job: Job) -> bool:
        settled = await super().ack(job)
        self._ends.put_nowait(End("settled", job.context_id, job.attempts))
        return settled

    async def retry_later(self, job: Job, *, counted: bool = True) -> bool:
        released = await super().retry_later(job, counted=counted)
        how = "given back" if counted else "postponed"
        self._ends.put_nowait(End(how, job.context_id, job.attempts))
        return released

    def wait_refused(self, seconds: float) -> None:
        """Change how long what nobody can build waits."""
        self._refused_seconds = seconds

    async def next_end(self) -> End:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._ends.get()


@dataclass
class Workbench:
    """A builder that is not started, and everything around it."""

    stores: Stores
    jobs: WatchedJobs
    loaded: LoadedModel
    model: GatedModel
    planner: Planner
    scheduler: Scheduler
    residency: Residency
    builder: Builder
    registry: Registry

    async def register(
        self, document: DocumentSpec = SHORT, compression: CompressionSpec = AT_THIRD
    ) -> ContextRecord:
        wanted = Registration(document, compression, None, {}, None, None)
        return await self.registry.register(TENANT, wanted)

    async def build(
        self, document: DocumentSpec = SHORT, compression: CompressionSpec = AT_THIRD
    ) -> ContextRecord:
        """Register, wait for the end of the build, and read the record."""
        record = await self.register(document, compression)
        if record.status != "ready":
            await self.jobs.next_end()
        return await self.record(record.id)

    async def record(self, context_id: str) -> ContextRecord:
        found = await self.stores.metadata.context(TENANT, context_id)
        assert found is not None
        return found

    async def load(self, record: ContextRecord, ratio: float | None) -> LoadedCache:
        """Load the cache of a context from the store."""
        stores = self.stores
        return await load(
            ObjectSource(stores.objects),
            stores.objects,
            stores.metadata,
            stores.leases,
            TENANT,
            record.cache_id,
            expected=self.planner.identity,
            ratio=ratio,
        )

    async def forget_builder(self, owner: str) -> None:
        """A builder is heard of no more, and has not been for long."""
        link = self.stores.metadata.link
        await link.command("XGROUP", "DELCONSUMER", BUILDS, "builders", owner)

    async def until_settled(self) -> None:
        """Return once a job was settled, however often it was given back before."""
        while (await self.jobs.next_end()).how != "settled":
            pass

    async def held(self) -> None:
        """Return once the engine stands before a forward."""
        await asyncio.to_thread(self.model.wait_until_held)

    def another(self, **parts: Any) -> Builder:
        """A builder of another process, or this one with some other parts; not started."""
        usual: dict[str, Any] = {
            "stores": self.stores,
            "planner": self.planner,
            "model": self.model,
            "scheduler": self.scheduler,
            "residency": self.residency,
            "owner": "another",
        }
        return Builder(**(usual | parts))


def generations(root: Path) -> list[str]:
    """The manifests of all generations in an object store."""
    return [name for name in files_below(root, "caches") if name.endswith("manifest.json")]


@asynccontextmanager
async def workbench(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Workbench]:
    """Open one; at the end its builder and its engine are stopped."""
    jobs = WatchedJobs(stores.metadata)
    stores = replace(stores, jobs=jobs)
    loaded, model = gated(tiny)
    planner = Planner(loaded)
    scheduler = Scheduler(model, max_waiting=8)
    residency = Residency(_no_load, budget_bytes=2**30, on_failure=_no_failure)
    # Only prepares what is registered; it is never started.
    worker = LocalWorker(
        loaded,
        stores,
        Recovery(stores, rebuilds=True),
        owner="front",
        max_queue=1,
        resident_bytes=0,
        sessions=Sessions(0, 60),
    )
    registry = Registry(stores, worker)
    builder = Builder(stores, planner, model, scheduler, residency, owner="builder")
    scheduler.start()
    try:
        yield Workbench(
            stores, jobs, loaded, model, planner, scheduler, residency, builder, registry
        )
    finally:
        await builder.stop()
        model.release()
        assert await asyncio.to_thread(scheduler.stop, PATIENCE_SECONDS)
        await registry.close()


async def _no_load(key: CacheKey, ratio: float, first_ratio: float, receiver: Receiver) -> Brought:
    raise AssertionError(f"nobody asks for {key} at {ratio}, {first_ratio} here: {receiver}")


def _no_failure(key: CacheKey, error: Exception) -> None:
    raise AssertionError(f"{key} failed") from error
