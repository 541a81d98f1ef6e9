"""Sweeping and reconciling go on for as long as the server runs, whatever a round of them meets."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep_service import upkeep as upkeep_module
from kvkeep_service.removal import Remover
from kvkeep_service.stores import Stores
from kvkeep_service.upkeep import Upkeep
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.errors import MetadataUnavailable, StoreMismatch
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.sweeper import Sweeper, SweepReport

from ...support.caches import facts_for, random_rows
from ...support.scripted_worker import ScriptedWorker
from ...support.stores import TENANT, context_for

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 60
NOTHING = SweepReport(0, 0, 0, 0, ())
WAITING = context_for(facts_for(random_rows()), "ctx_01")


class Scripted(Sweeper):
    """A sweeper whose rounds end as the test says; it tells when all of them are over."""

    def __init__(self, stores: Stores, *rounds: SweepReport | Exception) -> None:
        super().__init__(stores.objects, stores.metadata, stores.leases, 0)
        self._rounds = list(rounds)
        self.over = asyncio.Event()

    async def run_once(self) -> SweepReport:
        if not self._rounds:
            self.over.set()
            return NOTHING
        outcome = self._rounds.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
async def running() -> AsyncIterator[list[Upkeep]]:
    """What a test puts here is stopped at its end."""
    started: list[Upkeep] = []
    yield started
    for one in started:
        await one.stop()


def start(
    running: list[Upkeep],
    stores: Stores,
    sweeper: Sweeper,
    worker: ScriptedWorker,
    interval_seconds: float = 3600,
) -> Upkeep:
    remover = Remover(stores, worker)
    upkeep = Upkeep(
        stores, sweeper, worker, remover.repeat_undone, interval_seconds=interval_seconds
    )
    running.append(upkeep)
    upkeep.start()
    return upkeep


async def test_the_first_sweep_is_at_the_start_and_memory_lets_go_of_what_it_freed(
    running: list[Upkeep], stores: Stores
) -> None:
    expired = replace(WAITING, expires_at=time.time() - 10)
    await stores.metadata.create_context(expired)
    dropped: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    class Dropping(ScriptedWorker):
        async def drop(self, tenant: str, cache_id: str) -> None:
            dropped.put_nowait((tenant, cache_id))

    sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, 0)
    start(running, stores, sweeper, Dropping(stores))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await dropped.get() == (TENANT, expired.cache_id)
    assert await stores.metadata.context(TENANT, expired.id) is None


async def test_sweeping_goes_on_after_trouble_of_any_kind(
    running: list[Upkeep], stores: Stores, worker: ScriptedWorker
) -> None:
    sweeper = Scripted(
        stores,
        MetadataUnavailable("redis", "away"),
        StoreMismatch("a", "b"),
        TypeError("unforeseen"),
        SweepReport(1, 0, 0, 700, ((TENANT, "last"),)),
    )
    upkeep = start(running, stores, sweeper, worker, interval_seconds=0)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await sweeper.over.wait()
    assert worker.dropped == [(TENANT, "last")]
    assert (upkeep.swept["expired"], upkeep.swept["freed_bytes"]) == (1, 700)


async def test_a_forgotten_build_is_put_back_in_the_queue(
    running: list[Upkeep], stores: Stores, worker: ScriptedWorker
) -> None:
    # Registered by a process that died before it could enqueue.
    await stores.metadata.create_context(WAITING)
    start(running, stores, Scripted(stores), worker)
    job = await stores.jobs.claim("builder", PATIENCE_SECONDS)
    assert job is not None
    assert job.context_id == WAITING.id


async def test_reconciling_goes_on_after_trouble_of_any_kind(
    running: list[Upkeep],
    stores: Stores,
    worker: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upkeep_module, "_RECONCILE_SECONDS", 0)
    await stores.metadata.create_context(WAITING)
    troubles: list[Exception] = [MetadataUnavailable("redis", "away"), TypeError("unforeseen")]

    over = asyncio.Event()

    class Troubled(Jobs):
        async def reconcile(self, metadata: Metadata) -> int:
            if troubles:
                raise troubles.pop()
            if over.is_set():
                await asyncio.Event().wait()
            count = await super().reconcile(metadata)
            over.set()
            return count

    troubled = replace(stores, jobs=Troubled(stores.metadata))
    start(running, troubled, Scripted(stores), worker)
    assert await stores.jobs.claim("builder", PATIENCE_SECONDS) is not None
    assert troubles == []
    await over.wait()


async def test_field_28_what_another_process_deleted_is_forgotten_after_trouble_of_any_kind(
    running: list[Upkeep], stores: Stores, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep_module, "_FORGET_SECONDS", 0.01)
    forgotten = asyncio.Event()
    troubles: list[Exception] = [StoreMismatch("a", "b"), TypeError("unforeseen")]

    class Troubled(ScriptedWorker):
        def resident(self) -> list[tuple[str, str]]:
            if troubles:
                raise troubles.pop()
            return super().resident()

        async def drop(self, tenant: str, cache_id: str) -> None:
            await super().drop(tenant, cache_id)
            forgotten.set()

    troubled = Troubled(stores)
    troubled.held = [(TENANT, "deleted")]
    start(running, stores, Scripted(stores), troubled)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await forgotten.wait()
    assert troubled.dropped == [(TENANT, "deleted")]


async def test_leftovers_on_the_disk_tier_are_reclaimed_at_the_start(
    running: list[Upkeep], stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    disk = DiskTier.open(stores.objects, tmp_path / "disk", 10**6)
    left = tmp_path / "disk" / "store-any" / "caches" / "t" / "c" / "g" / "kv-00.safetensors.part"
    left.parent.mkdir(parents=True)
    left.touch()
    try:
        start(running, replace(stores, disk=disk), Scripted(stores), worker)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while left.exists():  # noqa: ASYNC110  # a file tells nobody that it goes
                await asyncio.sleep(0.01)
    finally:
        await disk.close()


async def test_stopping_ends_every_loop_at_once_also_in_the_middle_of_a_round(
    stores: Stores, worker: ScriptedWorker
) -> None:
    begun = asyncio.Semaphore(0)

    class Endless(Sweeper):
        async def run_once(self) -> SweepReport:
            begun.release()
            await asyncio.Event().wait()
            return NOTHING

    class EndlessJobs(Jobs):
        async def reconcile(self, metadata: Metadata) -> int:
            begun.release()
            await asyncio.Event().wait()
            return 0

    busy = replace(stores, jobs=EndlessJobs(stores.metadata))
    sweeper = Endless(stores.objects, stores.metadata, stores.leases, 0)
    remover = Remover(busy, worker)
    upkeep = Upkeep(busy, sweeper, worker, remover.repeat_undone, interval_seconds=3600)
    # Never started is stopped as well.
    await upkeep.stop()
    before = asyncio.all_tasks()
    upkeep.start()
    for _ in range(2):
        await begun.acquire()
    assert len(asyncio.all_tasks() - before) >= 3
    await upkeep.stop()
    assert asyncio.all_tasks() == before
