"""The local worker: one model in this process, joined to the store."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import structlog

from kvkeep_service.answer_failures import AnswerFailed, LogitsNotFinite
from kvkeep_service.asking import Asking
from kvkeep_service.bringing import ASIDE_MAX, Brought, Receiver
from kvkeep_service.build_counts import BuildCounts
from kvkeep_service.builder import Builder
from kvkeep_service.engine.graphs import GraphOptions
from kvkeep_service.engine.memory import is_out_of_memory
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.engine_counts import EngineCounts
from kvkeep_service.errors import (
    ContextModelMismatch,
    MemoryShort,
    Overloaded,
    ServiceError,
    Unsuitable,
)
from kvkeep_service.host_tier import HostTier
from kvkeep_service.loading import bring
from kvkeep_service.plan import Planner
from kvkeep_service.policies.head_scores import HeadScores
from kvkeep_service.ports import (
    AnswerEvent,
    CacheCounts,
    CompressionSpec,
    DocumentSpec,
    ModelInfo,
    Prepared,
    QueryRequest,
    TokenEvent,
    WorkerStats,
)
from kvkeep_service.recovery import Recovery, is_proven
from kvkeep_service.reservations import UNBOUNDED
from kvkeep_service.residency import Residency
from kvkeep_service.running import RunningQuery, run
from kvkeep_service.sessions import Sessions
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores
from kvkeep_service.telemetry import where
from kvkeep_storage.documents import get_document
from kvkeep_storage.errors import Corrupt, Incompatible, NotFound, StorageError
from kvkeep_storage.fingerprint import Fingerprint
from kvkeep_storage.keys import DocumentKey

_log = structlog.get_logger(__name__)

_STOP_SECONDS = 20.0


class LocalWorker:
    """Implements ``ports.Worker``: engine thread, residency and builder of this process."""

    def __init__(
        self,
        loaded: LoadedModel,
        stores: Stores,
        recovery: Recovery,
        *,
        owner: str,
        max_queue: int,
        resident_bytes: int,
        sessions: Sessions,
        memory_bytes: int = UNBOUNDED,
        host: HostTier | None = None,
        threads: int | None = None,
        head_scores: HeadScores | None = None,
        build_slice_seconds: float | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        """Nothing runs until ``start``. ``host`` is for a device with memory of its own.

        Bytes as for ``Residency``; the rest as for ``Scheduler``.
        """
        self._loaded = loaded
        self._stores = stores
        self._recovery = recovery
        self._planner = Planner(loaded, head_scores)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduler = Scheduler(
            loaded.language_model,
            max_waiting=max_queue,
            threads=threads,
            build_slice_seconds=build_slice_seconds,
            on_memory_short=self._memory_short,
            graphs=GraphOptions(cuda_graphs, self._graphs_held),
        )
        self._residency = Residency(
            self._bring,
            budget_bytes=resident_bytes,
            memory_bytes=memory_bytes,
            grows_in_place=loaded.language_model.device.type == "cpu",
            on_failure=self._load_failed,
            on_evicted=None if host is None else host.keep,
        )
        self._sessions = sessions
        self._host = host
        self._recoveries: set[asyncio.Task[None]] = set()
        self._builder = Builder(
            stores,
            self._planner,
            loaded.language_model,
            self._scheduler,
            self._residency,
            owner=owner,
        )

    @property
    def model(self) -> ModelInfo:
        """The served model."""
        return self._loaded.info

    def start(self) -> None:
        """Start the engine's thread and begin to claim builds."""
        self._loop = asyncio.get_running_loop()
        self._scheduler.start()
        self._builder.start()

    async def stop(self) -> None:
        """End builds (they return to the queue) and queries, then the engine's thread."""
        await self._builder.stop()
        await self._residency.close()
        self._sessions.close()
        if self._host is not None:
            await self._host.close()
        await asyncio.gather(*self._recoveries)
        if not await asyncio.to_thread(self._scheduler.stop, _STOP_SECONDS):
            _log.warning("engine_left_busy", after_seconds=_STOP_SECONDS)

    async def prepare(
        self, tenant: str, document: DocumentSpec, compression: CompressionSpec
    ) -> Prepared:
        """As ``ports.Worker.prepare``."""
        plan = await asyncio.to_thread(self._planner.plan, tenant, document, compression)
        model = self._loaded.language_model
        return Prepared(
            prefix_text=plan.prefix_text,
            document_tokens=len(plan.document.ids),
            protected_tokens=plan.num_protected,
            total_tokens=plan.document.num_tokens,
            policy_applied=plan.policy_applied,
            ratio=plan.ratio,
            full_bytes=model.shape.full_bytes(plan.document.num_tokens, model.dtype),
            fingerprint=plan.fingerprint,
            candidates=plan.candidates,
            remainder=plan.has_remainder,
        )

    async def planned(self, tenant: str, context_id: str) -> Fingerprint:
        """As ``ports.Worker.planned``."""
        body = await get_document(self._stores.objects, DocumentKey(tenant, context_id))
        return (await asyncio.to_thread(self._planner.plan_stored, tenant, body)).fingerprint

    async def query(self, *requests: QueryRequest) -> AsyncGenerator[TokenEvent | AnswerEvent]:
        """As ``ports.Worker.query``."""
        started = time.perf_counter()
        asking = Asking(self._loaded, self._sessions, requests)
        request = requests[0]
        key = CacheKey(request.tenant, request.cache_id)
        try:
            await asking.read()
            async with self._residency.pinned(key, asking.ratio, asking.min_ratio) as pinned:
                document_ids = await self._document_ids(request)
                sequences = await asking.sequences(pinned)
                queries = [
                    RunningQuery(sequence, received_at=started, tenant=request.tenant, index=index)
                    for index, sequence in enumerate(sequences)
                ]
                tail_bytes = sum(sequence.tail_bytes_max for sequence in sequences)
                with self._residency.reservations.for_answer(tail_bytes):
                    async with aclosing(run(queries, self._scheduler)) as events:
                        async for event in events:
                            if isinstance(event, TokenEvent):
                                yield event
                                continue
                            answer = await asyncio.to_thread(
                                event.answer,
                                pinned,
                                requests[event.index],
                                document_ids,
                                self._loaded.template.token_text,
                            )
                            await asking.keep(event, pinned)
                            yield answer
        except (Corrupt, NotFound) as error:
            if not is_proven(error):
                raise
            told = await self._recovery.recover(
                request.tenant, request.cache_id, request.context_id, error
            )
            # A generation that is not there, or not at that ratio, never comes back.
            gone = asking.gone() if isinstance(error, NotFound) else None
            raise gone or told from error
        except Incompatible as error:
            # A newer schema is no other model.
            if not hasattr(self._planner.identity, error.field):
                raise
            found, here = (
                f"{self.model.name} with {error.field} {value}"
                for value in (error.found, error.expected)
            )
            raise ContextModelMismatch(request.context_id, found, here) from error
        except (ServiceError, StorageError):
            raise
        # Whatever it was, who asked is told in words of the contract.
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ServiceError:
        if isinstance(error, FloatingPointError):
            return LogitsNotFinite(self.model.dtype)
        if is_out_of_memory(error):
            self._residency.give_up_idle()
            return MemoryShort("there was no memory for this answer")
        return AnswerFailed(error)

    async def prefetch(self, tenant: str, cache_id: str, ratio: float) -> None:
        """As ``ports.Worker.prefetch``."""
        if not self._residency.prefetch(CacheKey(tenant, cache_id), ratio):
            raise Overloaded(ASIDE_MAX, what="caches are being prefetched")

    async def drop(self, tenant: str, cache_id: str) -> None:
        """As ``ports.Worker.drop``."""
        self._residency.drop(CacheKey(tenant, cache_id))
        self._sessions.drop_cache(tenant, cache_id)
        if self._host is not None:
            self._host.drop(CacheKey(tenant, cache_id))
        self._stores.memory.clear()

    async def forget(self, tenant: str, context_id: str) -> None:
        """As ``ports.Worker.forget``."""
        self._sessions.drop_context(tenant, context_id)

    def conversations(self) -> list[tuple[str, str]]:
        """As ``ports.Worker.conversations``."""
        return self._sessions.contexts

    def resident(self) -> list[tuple[str, str]]:
        """As ``ports.Worker.resident``."""
        in_host_memory = [] if self._host is None else self._host.keys
        held = {*self._residency.keys, *in_host_memory}
        return [(key.tenant, key.cache_id) for key in sorted(held)]

    def stats(self) -> WorkerStats:
        """As ``ports.Worker.stats``."""
        engine = self._scheduler.stats()
        host = None if self._host is None else self._host.stats()
        return WorkerStats(
            resident_caches=self._residency.num_caches,
            resident_bytes=self._residency.size_bytes,
            pinned_caches=self._residency.num_pinned,
            running_queries=engine.running,
            waiting_queries=engine.waiting,
            running_builds=self._builder.num_running,
            alive=engine.is_alive,
            running_loads=self._residency.num_loads,
            reserved_bytes=self._residency.reservations.held_bytes,
            host_caches=host.entries if host else 0,
            host_bytes=host.size_bytes if host else 0,
            is_store_full=self._builder.space.is_full,
            sessions=len(self._sessions),
            session_bytes=self._sessions.size_bytes,
        )

    def build_counts(self) -> BuildCounts:
        """As ``ports.Worker.build_counts``."""
        return self._builder.counter.counts

    def cache_counts(self) -> CacheCounts:
        """As ``ports.Worker.cache_counts``."""
        return self._residency.counts()

    def engine_counts(self) -> EngineCounts:
        """As ``ports.Worker.engine_counts``."""
        return self._scheduler.counts()

    async def _bring(
        self, key: CacheKey, ratio: float, first_ratio: float, receiver: Receiver
    ) -> Brought:
        return await bring(
            self._stores,
            self._planner.identity,
            self._loaded.language_model,
            key,
            ratio,
            first_ratio,
            receiver,
            self._host,
        )

    def _memory_short(self) -> None:
        """On the engine's thread: let the event loop give up what can be brought again."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._residency.give_up_idle)

    def _graphs_held(self, size_bytes: int) -> None:
        """On the engine's thread: what graphs hold is not for caches, builds and tails."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._residency.reservations.withhold, size_bytes)

    def _load_failed(self, key: CacheKey, error: Exception) -> None:
        """A load that nobody waits for has failed; what it proved wrong is still to be rebuilt."""
        _log.warning("background_load_failed", cache=key.cache_id, where=where(error))
        if isinstance(error, Corrupt) and is_proven(error):
            task = asyncio.create_task(self._recover(key, error))
            self._recoveries.add(task)
            task.add_done_callback(self._recoveries.discard)

    async def _recover(self, key: CacheKey, error: Corrupt) -> None:
        try:
            await self._recovery.take_out(key.tenant, key.cache_id, error)
        except StorageError as trouble:
            # Bytes that are wrong will be found wrong again.
            _log.warning("recovery_postponed", cache=key.cache_id, code=trouble.code)

    async def _document_ids(self, request: QueryRequest) -> list[int] | None:
        """What the model saw before the question: the stored document, tokenised again.

        None when they are not wanted, or when the document is damaged or gone: an intact cache
        goes on answering without it.
        """
        if not request.return_token_ids:
            return None
        key = DocumentKey(request.tenant, request.context_id)
        try:
            body = await get_document(self._stores.objects, key)
        except (Corrupt, NotFound) as error:
            _log.warning("document_unreadable", context=request.context_id, code=error.code)
            return None
        try:
            plan = await asyncio.to_thread(self._planner.plan_stored, request.tenant, body)
        except Unsuitable:
            # What it was built with is elsewhere: its identity cannot be told here.
            return None
        if plan.fingerprint.digest != request.cache_id:
            return None
        return [*plan.document.prefix_ids, *plan.document.ids]
