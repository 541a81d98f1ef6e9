"""A worker with little memory: builds wait or fail by name, answers are refused."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvkeep_service.engine.build_memory import build_bytes
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import MemoryShort
from kvkeep_service.ports import AnswerEvent, QueryRequest
from kvkeep_service.stores import Stores

from .serving import Service, serving
from .test_worker_progress import until
from .tiny import LONG, SHORT, document_tokens
from .workbench import TENANT

pytestmark = pytest.mark.anyio


def needed(tiny: LoadedModel, document: object = SHORT) -> int:
    return build_bytes(tiny.language_model, document_tokens(tiny, document))  # type: ignore[arg-type]


async def begun(service: Service, request: QueryRequest) -> "asyncio.Task[object]":
    """A question whose answer stays in the engine until the gate is opened."""
    service.model.hold_after(0)
    running = asyncio.create_task(service.ids(request))
    await asyncio.to_thread(service.model.wait_until_held)
    return running


async def test_a_build_that_can_never_fit_fails_with_both_numbers(
    stores: Stores, tiny: LoadedModel
) -> None:
    limit = needed(tiny, LONG) - 1
    async with serving(stores, tiny, memory_bytes=limit) as service:
        assert (await service.ready(SHORT)).context_id
        too_long = await service.register(LONG)
        await service.jobs.next_end()
        record = await stores.metadata.context(TENANT, too_long)
        assert record is not None
        assert (record.status, record.error_code) == ("failed", "build_too_large")
        assert record.error_detail is not None
        assert str(limit) in record.error_detail
        assert str(limit + 1) in record.error_detail
        assert service.worker.stats().reserved_bytes == 0


async def test_what_graphs_of_a_gpu_hold_is_taken_out_of_the_bound(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny, memory_bytes=10**9) as service:
        memory = service.worker._residency.reservations
        await asyncio.to_thread(service.worker._graphs_held, 10**6)
        await until(lambda: memory.size_bytes == 10**9 - 10**6)
        await asyncio.to_thread(service.worker._graphs_held, -(10**6))
        await until(lambda: memory.size_bytes == 10**9)


async def test_a_build_waits_while_answers_have_the_memory_and_is_done_then(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny, memory_bytes=needed(tiny, LONG) + 1000) as service:
        request = await service.ready(SHORT)
        expected = await service.ids(request)
        running = await begun(service, request)
        waits = await service.register(LONG)
        await until(lambda: service.worker.stats().running_builds == 1)
        held = service.worker.stats().reserved_bytes
        service.model.release()
        assert await running == expected
        assert (await service.jobs.next_end()).how == "settled"
        record = await stores.metadata.context(TENANT, waits)
        assert record is not None
        assert record.status == "ready"
        assert 0 < held < needed(tiny, LONG)
        await until(lambda: service.worker.stats().reserved_bytes == 0)


async def test_an_answer_too_many_for_memory_is_refused_and_nothing_of_it_stays(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny, memory_bytes=needed(tiny)) as service:
        request = replace(await service.ready(SHORT), max_tokens=16)
        expected = await service.ids(request)
        running = await begun(service, request)
        large = replace(request, max_tokens=6000)
        with pytest.raises(MemoryShort):
            await service.ids(large)
        service.model.release()
        assert await running == expected
        stats = service.worker.stats()
        assert (stats.pinned_caches, stats.reserved_bytes) == (0, 0)
        # Alone it is let in.
        async with aclosing(service.worker.query(large)) as events:
            assert not isinstance(await anext(events), AnswerEvent)
        assert service.worker.stats().reserved_bytes == 0


async def test_idle_caches_give_way_to_a_build(stores: Stores, tiny: LoadedModel) -> None:
    async with serving(stores, tiny, memory_bytes=needed(tiny, LONG)) as service:
        await service.ready(SHORT)
        assert service.worker.stats().resident_caches == 1
        await service.ready(LONG)
        assert service.worker.cache_counts().evictions == 1


async def test_a_build_that_runs_out_of_memory_is_tried_again_and_then_said_to_have_failed(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny) as service:
        service.model.error = MemoryError()
        context_id = await service.register(SHORT)
        ends = [(await service.jobs.next_end()).how for _ in range(3)]
        record = await stores.metadata.context(TENANT, context_id)
        assert record is not None
        assert ends == ["given back", "given back", "settled"]
        assert record.error_code == "build_failed"
        assert record.error_detail is not None
        assert "too little memory" in record.error_detail
        service.model.error = None
        assert await service.ids(await service.ready(LONG))
