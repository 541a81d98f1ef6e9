"""A started worker with its registry, over real stores and a tiny model that can be held."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.ports import (
    AnswerEvent,
    CompressionSpec,
    DocumentSpec,
    QueryRequest,
    TokenEvent,
    WorkerStats,
)
from kvkeep_service.recovery import Recovery
from kvkeep_service.registration import Registration
from kvkeep_service.registry import Registry
from kvkeep_service.sessions import Sessions
from kvkeep_service.stores import Stores
from kvkeep_service.worker import LocalWorker
from kvkeep_storage.records import ContextRecord

from .engine.gated import GatedModel
from .tiny import AT_THIRD, SHORT, gated
from .workbench import TENANT, WatchedJobs

QUESTION = "Who pays, and when?"
IDLE = WorkerStats(
    resident_caches=0,
    resident_bytes=0,
    pinned_caches=0,
    running_queries=0,
    waiting_queries=0,
    running_builds=0,
    alive=True,
)


@dataclass
class Service:
    """A started worker, its registry, and what it stands on."""

    stores: Stores
    jobs: WatchedJobs
    loaded: LoadedModel
    model: GatedModel
    worker: LocalWorker
    registry: Registry

    async def ready(
        self, document: DocumentSpec = SHORT, compression: CompressionSpec = AT_THIRD
    ) -> QueryRequest:
        """Register and build; return a question on it, to be varied."""
        record = await self._registered(document, compression)
        if record.status != "ready":
            assert (await self.jobs.next_end()).how == "settled"
        askable = await self.registry.open_query(TENANT, record.id, None)
        return QueryRequest(
            TENANT,
            record.id,
            askable.cache_id,
            askable.ratio,
            QUESTION,
            max_tokens=8,
            return_token_ids=True,
        )

    async def register(self, document: DocumentSpec) -> str:
        """Register, and do not wait for the build. Returns the context's id."""
        return (await self._registered(document, AT_THIRD)).id

    async def _registered(
        self, document: DocumentSpec, compression: CompressionSpec
    ) -> ContextRecord:
        wanted = Registration(document, compression, None, {}, None, None)
        return await self.registry.register(TENANT, wanted)

    async def answer(self, request: QueryRequest) -> AnswerEvent:
        pieces = []
        async with aclosing(self.worker.query(request)) as events:
            async for event in events:
                if isinstance(event, AnswerEvent):
                    assert event.text == "".join(pieces)
                    return event
                pieces.append(event.text)
        raise AssertionError("no answer came")

    async def ids(self, request: QueryRequest) -> tuple[int, ...]:
        ids = (await self.answer(request)).token_ids
        assert ids is not None
        return ids

    async def status(self, request: QueryRequest) -> str:
        record = await self.stores.metadata.context(TENANT, request.context_id)
        assert record is not None
        return record.status


@asynccontextmanager
async def serving(
    stores: Stores, tiny: LoadedModel, *, rebuilds: bool = True, **options: Any
) -> AsyncIterator[Service]:
    jobs = WatchedJobs(stores.metadata)
    stores = replace(stores, jobs=jobs)
    loaded, model = gated(tiny)
    settings = {
        "max_queue": 64,
        "resident_bytes": 2**30,
        "sessions": Sessions(2**30, 3600),
    } | options
    worker = LocalWorker(
        loaded, stores, Recovery(stores, rebuilds=rebuilds), owner="worker", **settings
    )
    registry = Registry(stores, worker)
    worker.start()
    try:
        yield Service(stores, jobs, loaded, model, worker, registry)
    finally:
        model.release()
        await worker.stop()
        await registry.close()


def named(request: QueryRequest, number: int, **changes: object) -> QueryRequest:
    return replace(request, answer_id=f"ans_{number}", **changes)  # type: ignore[arg-type]  # fields


async def together(service: Service, requests: list[QueryRequest]) -> list[tuple[int, ...]]:
    answers: dict[int, AnswerEvent] = {}
    pieces = [""] * len(requests)
    async with aclosing(service.worker.query(*requests)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                pieces[event.question] += event.text
            else:
                answers[event.question] = event
    assert [answers[number].text for number in range(len(requests))] == pieces
    return [answers[number].token_ids or () for number in range(len(requests))]
