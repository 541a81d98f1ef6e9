"""The build loop: claim a job, build its cache, commit it, settle the job.

Every step may be the last thing that happens: the job stays in the queue until it is settled,
and a commit under a lease that was lost is refused by the store.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

import structlog

from kvkeep_service.engine.build import BuiltCache, Progress, build
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import BuildTask, Scheduler
from kvkeep_service.errors import ServiceError, WorkerUnavailable
from kvkeep_service.plan import BuildPlan, Planner, band_ratios
from kvkeep_service.ports import CompressionSpec, DocumentSpec, Span
from kvkeep_service.residency import CacheKey, Residency
from kvkeep_service.rows import to_store
from kvkeep_service.stores import Stores
from kvkeep_service.telemetry import where
from kvkeep_storage.binding import require_bound
from kvkeep_storage.commit import commit
from kvkeep_storage.documents import DocumentBody, get_document, mirror_context
from kvkeep_storage.errors import Corrupt, LeaseLost, NotFound, StorageError, Unreferenced
from kvkeep_storage.jobs import MAX_ATTEMPTS, Job
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.manifest import ManifestFacts
from kvkeep_storage.records import UNFINISHED, BuildLease, ContextRecord

_log = structlog.get_logger(__name__)

_BLOCK_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_PROGRESS_SECONDS = 0.25
_VERSIONS = ("kvkeep", "torch", "transformers", "safetensors")


class BuildFailed(Exception):
    """The context cannot be built, now or later: ``code`` and ``detail`` are for its record."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class ContextDeleted(Exception):
    """The context of a running build is gone."""


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
        self._planner = planner
        self._model = model
        self._scheduler = scheduler
        self._residency = residency
        self._owner = owner
        self._loop_task: asyncio.Task[None] | None = None
        self.num_running = 0

    def start(self) -> None:
        """Begin to claim builds."""
        self._loop_task = asyncio.create_task(self._claim_for_ever())

    async def stop(self) -> None:
        """Abandon the running build, which returns to the queue, and claim no more."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])

    async def _claim_for_ever(self) -> None:
        jobs = self._stores.jobs
        while True:
            try:
                job = await jobs.claim(self._owner, _BLOCK_SECONDS)
                if job is not None:
                    await self._work(job)
            except StorageError as error:
                _log.warning("build_queue_trouble", code=error.code)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _work(self, job: Job) -> None:
        """Settle one job: done, given back, or its context failed."""
        self.num_running += 1
        try:
            done = await self._attempt(job)
        except BuildFailed as error:
            await self._fail(job, error.code, error.detail)
            done = True
        except (ContextDeleted, Unreferenced):
            done = True
        except asyncio.CancelledError:
            # Stopping: nobody's fault, so the attempt is not counted.
            with suppress(StorageError):
                await asyncio.shield(self._stores.jobs.retry_later(job, counted=False))
            raise
        except WorkerUnavailable:
            done = None
        except StorageError as error:
            _log.warning("build_interrupted", context=job.context_id, code=error.code)
            done = False
        # Whatever a build raises ends this attempt, not the loop.
        except Exception as error:  # noqa: BLE001
            _log.error("build_error", context=job.context_id, where=where(error))
            done = False
        finally:
            self.num_running -= 1
        if done:
            await self._stores.jobs.ack(job)
        else:
            await self._stores.jobs.retry_later(job, counted=done is False)

    async def _attempt(self, job: Job) -> bool | None:
        """True: settled. None: cannot be tried now. Raises whatever ends the attempt."""
        metadata = self._stores.metadata
        record = await metadata.context(job.tenant, job.context_id)
        if record is None or record.status not in UNFINISHED:
            return True
        if record.model != self._planner.identity.model:
            return None
        if await metadata.attach(job.tenant, job.context_id, time.time()) is not None:
            await self._mirror(job)
            return True
        if job.attempts > MAX_ATTEMPTS:
            raise BuildFailed("build_failed", f"given up after {MAX_ATTEMPTS} attempts")
        lease = await self._stores.leases.acquire_build(job.tenant, record.cache_id, self._owner)
        if lease is None:
            return None
        try:
            await self._build_and_commit(job, record, lease)
        finally:
            with suppress(StorageError):
                await asyncio.shield(self._stores.leases.release(lease))
        return True

    async def _build_and_commit(self, job: Job, record: ContextRecord, lease: BuildLease) -> None:
        metadata = self._stores.metadata
        plan, body = await self._plan(job, record)
        await metadata.set_building(
            job.tenant, job.context_id, rebuilding=record.status == "rebuilding"
        )
        committed = await metadata.cache(job.tenant, record.cache_id)
        ratio = 1.0 if plan.policy is None else body.ratio
        ratios = band_ratios(ratio, committed.ratios if committed else ())
        async with self._kept_alive(job, lease) as report:
            started = time.time()
            built = await self._run(plan, ratios, report)
            facts = _facts(plan, built, ratio, queued_seconds=started - record.created_at)
            rows = await asyncio.to_thread(to_store, built)
            report(Progress("storing", 1.0))
            stores = self._stores
            await commit(stores.objects, metadata, stores.leases, lease, rows, facts)
        self._residency.adopt(CacheKey(job.tenant, record.cache_id), built.context)

    async def _plan(self, job: Job, record: ContextRecord) -> tuple[BuildPlan, DocumentBody]:
        """Read the document again; the fingerprint must be the one that was promised."""
        try:
            body = await get_document(self._stores.objects, DocumentKey(job.tenant, job.context_id))
        except NotFound as error:
            if await self._stores.metadata.context(job.tenant, job.context_id) is None:
                raise ContextDeleted from error
            # A lost or wrongly mounted data directory is trouble, not proof.
            await require_bound(self._stores.objects, self._stores.metadata)
            raise BuildFailed("document_corrupt", "the stored document is missing") from error
        except Corrupt as error:
            raise BuildFailed("document_corrupt", "the stored document is damaged") from error
        try:
            plan = await asyncio.to_thread(
                self._planner.plan,
                job.tenant,
                _document_spec(body),
                _compression_spec(body),
                body.prefix_text,
            )
        except ServiceError as error:
            raise BuildFailed(error.code, error.detail) from error
        if plan.fingerprint.digest != record.cache_id:
            raise BuildFailed(
                "cache_incompatible",
                "model, tokenizer or policy changed since the document was registered",
            )
        return plan, body

    async def _run(
        self, plan: BuildPlan, ratios: tuple[float, ...], report: Callable[[Progress], None]
    ) -> BuiltCache:
        """Hand the build to the engine's thread and wait for it; cancelling abandons it."""
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[BuiltCache] = loop.create_future()

        def settle(built: BuiltCache | None, error: BaseException | None) -> None:
            if finished.done():
                return
            if built is not None:
                finished.set_result(built)
            else:
                finished.set_exception(error or ContextDeleted())

        task = BuildTask(
            steps=build(self._model, plan.document, policy=plan.policy, ratios=ratios),
            on_progress=lambda progress: _post(loop, report, progress),
            on_finished=lambda built, error: _post(loop, settle, built, error),
        )
        self._scheduler.submit_build(task)
        try:
            return await finished
        finally:
            task.cancelled.set()

    @asynccontextmanager
    async def _kept_alive(
        self, job: Job, lease: BuildLease
    ) -> AsyncIterator[Callable[[Progress], None]]:
        """Keep lease and job while the block runs; losing either, or the context, cancels it."""
        latest: list[Progress] = []

        def report(progress: Progress) -> None:
            latest[:] = [progress]

        body = asyncio.current_task()
        assert body is not None
        reason: list[Exception] = []

        async def beat() -> None:
            try:
                await self._beat(job, lease, latest)
            except (LeaseLost, ContextDeleted) as error:
                reason.append(error)
                body.cancel()

        beating = asyncio.create_task(beat())
        try:
            yield report
        except asyncio.CancelledError:
            if not reason:
                raise
            body.uncancel()
            raise reason[0] from None
        finally:
            beating.cancel()
            await asyncio.wait([beating])

    async def _beat(self, job: Job, lease: BuildLease, latest: list[Progress]) -> None:
        stores, beat_at = self._stores, 0.0
        while True:
            try:
                if time.monotonic() >= beat_at:
                    await stores.leases.renew(lease)
                    await stores.jobs.heartbeat(job, self._owner)
                    beat_at = time.monotonic() + stores.jobs.heartbeat_seconds
                await self._show(job, latest)
            except LeaseLost:
                raise
            except StorageError as error:
                # Redis may come back before the lease runs out; if not, the commit is refused.
                _log.warning("heartbeat_missed", context=job.context_id, code=error.code)
            await asyncio.sleep(_PROGRESS_SECONDS)

    async def _show(self, job: Job, latest: list[Progress]) -> None:
        """Write the latest progress. Raises: ContextDeleted when there is nothing to write to."""
        if not latest:
            return
        progress = latest.pop()
        metadata = self._stores.metadata
        shown = await metadata.progress(
            job.tenant, job.context_id, progress.stage, progress.fraction
        )
        if not shown and await metadata.context(job.tenant, job.context_id) is None:
            raise ContextDeleted

    async def _fail(self, job: Job, code: str, detail: str) -> None:
        _log.warning("build_failed", context=job.context_id, code=code)
        await self._stores.metadata.fail_context(job.tenant, job.context_id, code, detail)
        await self._mirror(job)

    async def _mirror(self, job: Job) -> None:
        key = DocumentKey(job.tenant, job.context_id)
        await mirror_context(self._stores.objects, self._stores.metadata, key)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Call something on the event loop from the engine's thread; a closed loop needs no news."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


def _facts(
    plan: BuildPlan, built: BuiltCache, ratio: float, *, queued_seconds: float
) -> ManifestFacts:
    return ManifestFacts(
        fingerprint=plan.fingerprint,
        tokens_total=plan.document.num_tokens,
        tokens_protected=plan.num_protected,
        ratio=ratio,
        ratio_achieved=built.selection.ratio_achieved,
        policy_applied=built.policy_applied,
        timings={"queue_s": queued_seconds, **built.timings},
        versions={name: version(name) for name in _VERSIONS},
    )


def _document_spec(body: DocumentBody) -> DocumentSpec:
    spans = tuple(Span(start, end) for start, end in body.protect)
    return DocumentSpec(body.text, body.system, body.instructions, spans)


def _compression_spec(body: DocumentBody) -> CompressionSpec:
    return CompressionSpec(
        policy="none" if body.policy == "none" else "kvzip",
        ratio=body.ratio,
        scoring="exact" if body.scoring == "exact" else "local",
    )
