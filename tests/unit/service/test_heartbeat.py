"""A build knows within a beat that its lease, its job or its context is lost, and ends with it."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvkeep_service import heartbeat
from kvkeep_service.engine.build import Progress
from kvkeep_service.heartbeat import ContextDeleted, Heartbeat
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import LeaseLost, MetadataUnavailable
from kvkeep_storage.jobs import Job, Jobs
from kvkeep_storage.records import BuildLease

from ...support.caches import facts_for, random_rows
from ...support.registering import breaking
from ...support.stores import TENANT
from ...support.stores import Stores as Storage

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 60
FACTS = facts_for(random_rows())


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_PROGRESS_SECONDS", 0.001)


@dataclass
class Held:
    """A claimed job with its build lease, and stores that beat at every round."""

    stores: Stores
    job: Job
    lease: BuildLease

    def heartbeat(self, stores: Stores | None = None) -> Heartbeat:
        return Heartbeat(stores or self.stores, self.job, self.lease)


@pytest.fixture
async def held(stores: Stores, tmp_path: Path) -> Held:
    quick = replace(stores, jobs=Jobs(stores.metadata, heartbeat_seconds=0.001))
    storage = await Storage.open(tmp_path, stores.metadata)
    await storage.register(FACTS)
    await quick.jobs.enqueue(TENANT, "ctx_01")
    job = await quick.jobs.claim("builder", 1)
    assert job is not None
    await quick.metadata.set_building(TENANT, "ctx_01", rebuilding=False)
    return Held(quick, job, await storage.lease(FACTS))


async def for_ever() -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.Event().wait()


async def test_progress_is_written_while_the_block_runs(held: Held) -> None:
    metadata = held.stores.metadata
    async with held.heartbeat().beating() as report:
        report(Progress("scoring", 0.625))
        while True:
            record = await metadata.context(TENANT, "ctx_01")
            assert record is not None
            if record.stage == "scoring":
                break
    assert record.fraction == 0.625


async def build_and_lose(heart: Heartbeat, lose: Awaitable[object]) -> None:
    """A block that would run for ever, of which something is lost."""
    async with heart.beating() as report:
        await lose
        report(Progress("scoring", 0.5))
        await for_ever()


async def test_a_lost_build_lease_ends_the_block(held: Held) -> None:
    with pytest.raises(LeaseLost) as lost:
        await build_and_lose(held.heartbeat(), held.stores.leases.release(held.lease))
    assert lost.value.kind == "build lease"
    assert_not_cancelled()


async def test_a_lost_job_ends_the_block(held: Held) -> None:
    with pytest.raises(LeaseLost) as lost:
        await build_and_lose(held.heartbeat(), held.stores.jobs.ack(held.job))
    assert lost.value.kind == "job"
    assert_not_cancelled()


async def test_a_deleted_context_ends_the_block(held: Held) -> None:
    delete = held.stores.metadata.delete_context(TENANT, "ctx_01")
    with pytest.raises(ContextDeleted):
        await build_and_lose(held.heartbeat(), delete)
    assert_not_cancelled()


async def test_a_context_that_is_no_longer_building_does_not(held: Held) -> None:
    # Another process made it ready, say; the commit will find out.
    await held.stores.metadata.fail_context(TENANT, "ctx_01", "build_failed", "elsewhere")
    jobs = BeatingJobs(held.stores)
    async with held.heartbeat(replace(held.stores, jobs=jobs)).beating() as report:
        report(Progress("scoring", 0.5))
        await jobs.beaten(3)


async def test_an_outage_is_waited_out(held: Held) -> None:
    jobs = BeatingJobs(held.stores, fail_first=3)
    async with held.heartbeat(replace(held.stores, jobs=jobs)).beating():
        await jobs.beaten(3)


async def test_whatever_else_ends_the_beats_ends_the_block(held: Held) -> None:
    broken = breaking(held.stores, "leases", "renew", KeyError("unforeseen"))
    with pytest.raises(KeyError):
        async with held.heartbeat(broken).beating():
            await for_ever()
    assert_not_cancelled()


async def test_the_error_of_the_block_stays_its_own(held: Held) -> None:
    with pytest.raises(ZeroDivisionError):
        async with held.heartbeat().beating():
            raise ZeroDivisionError
    assert_not_cancelled()


async def test_a_stop_stays_a_cancellation(held: Held) -> None:
    entered = asyncio.Event()

    async def build() -> None:
        async with held.heartbeat().beating():
            entered.set()
            await for_ever()

    building = asyncio.create_task(build())
    await entered.wait()
    building.cancel()
    await asyncio.wait([building])
    assert building.cancelled()


@pytest.mark.parametrize("stop_first", [True, False])
async def test_a_stop_together_with_a_loss_stays_a_cancellation(
    held: Held, *, stop_first: bool
) -> None:
    entered, go = asyncio.Event(), asyncio.Event()
    building: asyncio.Task[None]

    def stop() -> None:
        building.cancel()

    def lose() -> None:
        leases.trouble = KeyError("lost")
        go.set()

    class Leases:
        trouble: Exception | None = None

        async def renew(self, _: BuildLease) -> None:
            await go.wait()
            if not stop_first:
                # The beat cancels the block first, the stop comes before it could notice.
                asyncio.get_running_loop().call_soon(stop)
            assert self.trouble is not None
            raise self.trouble

    leases = Leases()

    async def build() -> None:
        stores = replace(held.stores, leases=leases)  # type: ignore[arg-type]
        async with held.heartbeat(stores).beating():
            entered.set()
            await for_ever()

    building = asyncio.create_task(build())
    await entered.wait()
    lose()
    if stop_first:
        stop()
    await asyncio.wait([building])
    assert building.cancelled()


async def test_a_loss_after_the_block_has_ended_cancels_nobody(held: Held) -> None:
    class Leases:
        async def renew(self, _: BuildLease) -> None:
            # Swallows its cancellation, as libraries do, and comes back with bad news.
            try:
                await for_ever()
            except asyncio.CancelledError:
                raise LeaseLost("build lease", "cache", "builder") from None

    stores = replace(held.stores, leases=Leases())  # type: ignore[arg-type]
    async with held.heartbeat(stores).beating():
        await _turns(3)
    await _turns(3)
    assert_not_cancelled()


def assert_not_cancelled() -> None:
    """A task that counts itself cancelled breaks the next one who asks."""
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def _turns(count: int) -> None:
    """Let everything else that is ready run, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


class BeatingJobs:
    """The real queue, counting beats, and out of reach for the first few."""

    def __init__(self, stores: Stores, fail_first: int = 0) -> None:
        self.heartbeat_seconds = 0.001
        self._jobs = stores.jobs
        self._left = fail_first
        self._count = 0
        self._beat = asyncio.Condition()

    async def heartbeat(self, job: Job, owner: str) -> None:
        if self._left:
            self._left -= 1
            raise MetadataUnavailable("redis script", "away")
        await self._jobs.heartbeat(job, owner)
        async with self._beat:
            self._count += 1
            self._beat.notify_all()

    async def beaten(self, count: int) -> None:
        async with self._beat:
            await self._beat.wait_for(lambda: self._count >= count)
