"""The build loop: claim a job, build its cache, commit it, settle the job.

Every step may be the last thing that happens: the job stays in the queue until it is settled,
and a commit under a lease that was lost is refused by the store.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.metadata import version

import structlog

from kvkeep_service.build_counts import BuildCounter
from kvkeep_service.build_run import run_build
from kvkeep_service.engine.build import BuiltCache, Progress
from kvkeep_service.engine.build_memory import build_bytes
from kvkeep_service.engine.checking import LossUnreachable
from kvkeep_service.engine.memory import is_out_of_memory
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.errors import Unsuitable, WorkerUnavailable
from kvkeep_service.heartbeat import ContextDeleted, Heartbeat
from kvkeep_service.job_turns import JobTurns
from kvkeep_service.known_ratio import ratio_by
from kvkeep_service.plan import BuildPlan, Planner, candidates, ratios_to_build
from kvkeep_service.promises import BuildFailed, DeletionBegun, Postponed, Promises
from kvkeep_service.reservations import BuildTooLarge
from kvkeep_service.residency import Residency
from kvkeep_service.rows import to_store
from kvkeep_service.shelf import CacheKey
from kvkeep_service.space import Space
from kvkeep_service.stores import Stores
from kvkeep_service.telemetry import where
from kvkeep_storage.commit import commit, new_generation
from kvkeep_storage.documents import mirror_context
from kvkeep_storage.errors import (
    Full,
    LeaseLost,
    MetadataUnavailable,
    StorageError,
    StoreMismatch,
    Unreferenced,
)
from kvkeep_storage.jobs import MAX_ATTEMPTS, REFUSED_SECONDS, Job
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.manifest import ManifestFacts
from kvkeep_storage.records import BuildLease, CacheRecord, ContextRecord

_log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0
_GIVEN_UP = f"given up after {MAX_ATTEMPTS} attempts"
_REFUSED = f"for {REFUSED_SECONDS / 60:.0f} minutes no running server could build it"
_HALF_GONE = "its deletion was begun and never ended: delete it again"
_VERSIONS = ("kvkeep", "torch", "transformers", "safetensors")


class Builder:
    """Takes builds from the durable queue, one at a time, for as long as it runs."""

    def __init__(
        self,
        stores: Stores,
        planner: Planner,
        model: LanguageModel,
        scheduler: Scheduler,
        residency: Residency,
        *,
        owner: str,
    ) -> None:
        """``owner`` names this process in leases and in the queue; unique per process."""
        self._stores = stores
        self._promises = Promises(stores, planner)
        self._model = model
        self._scheduler = scheduler
        self._residency = residency
        self._owner = owner
        self._turns = JobTurns(stores.jobs, owner)
        self.space = Space(stores.objects)
        self._loop_task: asyncio.Task[None] | None = None
        self.num_running = 0
        self.counter = BuildCounter()

    def start(self) -> None:
        """Begin to claim builds."""
        self._loop_task = asyncio.create_task(self._claim_for_ever())

    async def stop(self) -> None:
        """Abandon the running build, which returns to the queue, and claim no more."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])

    async def _claim_for_ever(self) -> None:
        while True:
            try:
                job = await self._turns.claim()
                if job is not None:
                    await self._work(job)
                    self._turns.served(job.tenant)
            except StorageError as error:
                _log.warning("build_queue_trouble", code=error.code)
                await asyncio.sleep(_RETRY_SECONDS)
            # Nobody would notice that builds are no longer taken.
            except Exception as error:  # noqa: BLE001
                _log.error("build_queue_error", where=where(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _work(self, job: Job) -> None:
        """Settle one job: done, given back, or its context failed."""
        jobs = self._stores.jobs
        self.num_running += 1
        try:
            await self._attempt(job)
        except BuildFailed as error:
            await self._fail(job, error.code, error.detail)
        except Unsuitable as error:
            # It waits for a server like the one it was registered at; this one never will be.
            if not await jobs.refuse(job):
                await jobs.retry_later(job, counted=False)
                return
            await self._fail(job, error.code, f"{_REFUSED}; {error.detail}")
        except DeletionBegun:
            if job.attempts < MAX_ATTEMPTS:
                await jobs.retry_later(job)
                return
            # Whoever deleted it has died. Without a mirror: that would make a loss of it.
            metadata = self._stores.metadata
            await metadata.fail_context(job.tenant, job.context_id, "document_corrupt", _HALF_GONE)
        except (ContextDeleted, Unreferenced):
            _log.info("build_unwanted", context=job.context_id)
        except asyncio.CancelledError:
            # Stopping: nobody's fault, so the attempt is not counted.
            with suppress(StorageError):
                await asyncio.shield(jobs.retry_later(job, counted=False))
            raise
        except (Postponed, WorkerUnavailable):
            await jobs.retry_later(job, counted=False)
            return
        except (MetadataUnavailable, StoreMismatch, Full) as error:
            _log.warning("build_postponed", context=job.context_id, code=error.code)
            await jobs.retry_later(job, counted=False)
            return
        except StorageError as error:
            _log.warning("build_interrupted", context=job.context_id, code=error.code)
            await self._retry(job, error)
            return
        # Whatever a build raises ends this attempt, not the loop.
        except Exception as error:  # noqa: BLE001
            _log.error("build_error", context=job.context_id, where=where(error))
            if is_out_of_memory(error):
                self._residency.give_up_idle()
            await self._retry(job, error)
            return
        finally:
            self.num_running -= 1
        await jobs.ack(job)

    async def _retry(self, job: Job, error: Exception) -> None:
        """Give a job back after an attempt, or, after the last one, fail its context."""
        jobs, metadata = self._stores.jobs, self._stores.metadata
        # Who lost a lease does not know what its next holder has achieved.
        if job.attempts < MAX_ATTEMPTS or isinstance(error, LeaseLost):
            await jobs.retry_later(job)
            return
        await jobs.heartbeat(job, self._owner)
        if await metadata.attach(job.tenant, job.context_id, time.time()) is None:
            # Not the message: a library's may quote the document.
            reason = error.code if isinstance(error, StorageError) else type(error).__name__
            if is_out_of_memory(error):
                reason = "too little memory"
            await self._fail(job, "build_failed", f"{_GIVEN_UP}, the last ended with {reason}")
        await jobs.ack(job)

    async def _attempt(self, job: Job) -> None:
        """Bring the context of a job to its end. Raises whatever ends the attempt without one."""
        metadata, leases = self._stores.metadata, self._stores.leases
        record = await metadata.context(job.tenant, job.context_id)
        if record is None or not record.awaits_build:
            return
        self._promises.check_model(record)
        await self._find_ratio(job, record)
        if await metadata.attach(job.tenant, job.context_id, time.time()) is not None:
            await self._mirror(job)
            return
        self._promises.check_known(record)
        if not await self.space.is_there():
            raise Postponed
        lease = await leases.acquire_build(job.tenant, record.cache_id, self._owner)
        if lease is None:
            raise Postponed
        try:
            if job.attempts > MAX_ATTEMPTS:
                raise BuildFailed("build_failed", _GIVEN_UP)
            await self._build_and_commit(job, record, lease)
        finally:
            with suppress(StorageError):
                await asyncio.shield(leases.release(lease))

    async def _find_ratio(self, job: Job, record: ContextRecord) -> None:
        """Settle the ratio of a context, where what others have built meanwhile decides it."""
        if record.ratio_from is None:
            return
        committed = await self._stores.metadata.cache(job.tenant, record.cache_id)
        ratio = ratio_by(committed, record, candidates(record.ratio_from, record.ratio))
        if ratio is not None:
            await self._stores.metadata.find_ratio(job.tenant, job.context_id, ratio)

    async def _build_and_commit(self, job: Job, record: ContextRecord, lease: BuildLease) -> None:
        stores = self._stores
        metadata = stores.metadata
        key = CacheKey(job.tenant, record.cache_id)
        async with Heartbeat(stores, job, lease).beating() as report:
            plan = await self._promises.plan(record)
            if record.status != "ready":
                is_rebuild = record.status == "rebuilding"
                await metadata.set_building(job.tenant, job.context_id, rebuilding=is_rebuild)
            committed = await metadata.cache(*key)
            started = time.time()
            max_loss = None if record.ratio_from is None else record.max_loss
            relied_on = committed.ratios if committed else ()
            ratios = ratios_to_build(plan, record.ratio, max_loss, relied_on)
            async with self._room(plan):
                built = await run_build(self._scheduler, self._model, plan, ratios, report)
            if built.chosen is not None:
                await metadata.find_ratio(job.tenant, job.context_id, built.chosen)
            facts = _facts(plan, built, committed, queued_seconds=started - record.created_at)
            rows = await asyncio.to_thread(to_store, built)
            report(Progress("storing", 1.0))
            # Before the commit makes contexts ready: their first questions find it in memory.
            seconds = sum(built.timings.values())
            generation = new_generation()
            context = replace(built.context, generation=generation)
            self._residency.adopt(key, context, build_seconds=seconds)
            try:
                await commit(
                    stores.objects,
                    metadata,
                    stores.leases,
                    lease,
                    rows,
                    facts,
                    generation=generation,
                )
            except BaseException as error:
                self._residency.drop(key)
                if isinstance(error, Full):
                    self.space.ran_out(rows.size_bytes)
                raise
            self.space.was_enough()
            loss = built.fidelity.loss(facts.ratio) if built.fidelity else None
            self.counter.committed(built.timings, loss)
        if await metadata.cache(*key) is None:
            # Deleted since the commit, by somebody who found nothing to drop yet.
            self._residency.drop(key)

    @asynccontextmanager
    async def _room(self, plan: BuildPlan) -> AsyncIterator[None]:
        """Memory for a build, once there is as much.

        Raises: BuildFailed, when there never is, and when what is built loses too much.
        """
        size_bytes = build_bytes(self._model, plan.document.num_tokens)
        try:
            async with self._residency.reservations.for_build(size_bytes):
                yield
        except BuildTooLarge as error:
            raise BuildFailed("build_too_large", str(error)) from error
        except LossUnreachable as error:
            raise BuildFailed("max_loss_unreachable", str(error)) from error

    async def _fail(self, job: Job, code: str, detail: str) -> None:
        _log.warning("build_failed", context=job.context_id, code=code)
        self.counter.failed(code)
        await self._stores.metadata.fail_context(job.tenant, job.context_id, code, detail)
        await self._mirror(job)

    async def _mirror(self, job: Job) -> None:
        """The record says how the build ended; a mirror behind it must not bring the job back."""
        key = DocumentKey(job.tenant, job.context_id)
        try:
            await mirror_context(self._stores.objects, self._stores.metadata, key)
        except StorageError as error:
            _log.warning("mirror_behind", context=job.context_id, code=error.code)


def _facts(
    plan: BuildPlan, built: BuiltCache, committed: CacheRecord | None, *, queued_seconds: float
) -> ManifestFacts:
    fidelity = built.fidelity
    if fidelity is not None and committed is not None:
        fidelity = fidelity.with_those_of(committed.fidelity)
    return ManifestFacts(
        fingerprint=plan.fingerprint,
        tokens_total=plan.document.num_tokens,
        tokens_protected=plan.num_protected,
        ratio=built.selection.ratios[-1],
        ratio_achieved=built.selection.ratio_achieved,
        policy_applied=built.policy_applied,
        timings={"queue_s": queued_seconds, **built.timings},
        versions={name: version(name) for name in _VERSIONS},
        fidelity=fidelity,
    )
