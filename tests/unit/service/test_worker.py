"""The worker whole: real stores, a real engine, and everything it holds given back."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import (
    Overloaded,
    QuestionTooLong,
    WorkerUnavailable,
)
from kvkeep_service.ports import (
    CompressionSpec,
    DocumentSpec,
    QueryRequest,
)
from kvkeep_service.registration import Registration
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores

from ...support.documents import contract
from .engine.gated import PATIENCE_SECONDS, answer_alone
from .serving import IDLE, Service, serving
from .tiny import AT_THIRD, LONG, SHORT, document_tokens, with_positions
from .workbench import TENANT

pytestmark = pytest.mark.anyio


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


async def test_field_13_an_answer_is_what_the_engine_gives_for_the_cache(service: Service) -> None:
    request = await service.ready()
    answer = await service.answer(replace(request, ratio=0.1, max_tokens=16))
    entry = service.worker._residency._shelf.find(CacheKey(TENANT, request.cache_id))
    assert entry is not None
    context = entry.context
    assert answer.prompt_token_ids is not None
    alone = Sequence(
        service.loaded.language_model,
        context.view(0.1),
        answer.prompt_token_ids[answer.cached_tokens :],
        SequenceOptions(16),
        tokenizer=service.loaded.tokenizer,
        stop_ids=service.loaded.stop_ids,
    )
    assert list(answer.token_ids or ()) == answer_alone(service.loaded.language_model, alone)
    assert answer.text == service.loaded.tokenizer.decode(
        answer.token_ids, skip_special_tokens=True
    )
    assert (answer.ratio, answer.finish_reason) == (0.1, "length")
    assert answer.cached_tokens == context.num_tokens == document_tokens(service.loaded, SHORT)
    assert answer.prompt_tokens == len(answer.prompt_token_ids) > answer.cached_tokens
    assert answer.completion_tokens == 16


async def test_an_answer_from_the_store_is_the_one_from_memory(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny) as first:
        request = await first.ready()
        built = await first.answer(request)
        assert built.timings.source == "resident"
    # Another process, which has only the store.
    async with serving(stores, tiny) as second:
        cold, warm = await second.answer(request), await second.answer(request)
        assert (cold.timings.source, warm.timings.source) == ("store", "resident")
        assert cold.token_ids == warm.token_ids == built.token_ids
        low = replace(request, ratio=0.05)
        assert (await second.answer(low)).token_ids == (await second.answer(low)).token_ids
        assert second.worker.stats().resident_caches == 1


async def test_a_question_longer_than_the_positions_left_is_refused_with_both_numbers(
    stores: Stores, tiny: LoadedModel
) -> None:
    total = document_tokens(tiny, SHORT)
    async with serving(stores, with_positions(tiny, total + 256)) as service:
        request = await service.ready()

        def words(count: int) -> QueryRequest:
            return replace(request, question=" pear" * count, max_tokens=1)

        around = (await service.answer(words(1))).prompt_tokens - total - 1
        # One position is left for the answer: the longest question that can be asked.
        longest = await service.answer(words(255 - around))
        assert longest.prompt_tokens == total + 255
        with pytest.raises(QuestionTooLong) as refused:
            await service.answer(words(256 - around))
        assert (refused.value.tokens, refused.value.max_tokens) == (256, 255)
        assert service.worker.stats().pinned_caches == 0


async def test_an_answer_ends_where_the_positions_end(stores: Stores, tiny: LoadedModel) -> None:
    total = document_tokens(tiny, SHORT)
    async with serving(stores, with_positions(tiny, total + 256)) as service:
        request = replace(await service.ready(), question=" pear" * 200, max_tokens=1000)
        answer = await service.answer(request)
        assert answer.finish_reason == "length"
        assert answer.prompt_tokens + answer.completion_tokens == total + 256
        assert answer.completion_tokens > 1


async def test_one_more_than_may_wait_is_overloaded_and_lets_go_of_its_cache(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny, max_queue=1) as service:
        request = await service.ready()
        service.model.hold_after(0)
        running = asyncio.create_task(service.ids(request))
        await asyncio.to_thread(service.model.wait_until_held)
        waiting = asyncio.create_task(service.ids(request))
        while not service.worker.stats().waiting_queries:
            await asyncio.to_thread(int)
        with pytest.raises(Overloaded):
            await service.answer(request)
        assert service.worker.stats() == replace(
            service.worker.stats(), running_queries=1, waiting_queries=1, pinned_caches=1
        )
        service.model.release()
        assert await running == await waiting


async def test_field_22_nothing_is_held_after_many_queries_half_of_them_cancelled(
    stores: Stores, tiny: LoadedModel
) -> None:
    rng = random.Random(4)
    # Room for one cache of three, or two, so that they come and go as well.
    async with serving(stores, tiny, resident_bytes=200_000) as service:
        requests = [
            await service.ready(DocumentSpec(contract(title, clauses)), CompressionSpec(ratio=0.6))
            for title, clauses in (("One", 10), ("Two", 13), ("Three", 16))
        ]
        alone = {(n, ratio): [] for n in range(3) for ratio in (0.1, 0.6)}
        for n, ratio in alone:
            alone[n, ratio] = await service.ids(replace(requests[n], ratio=ratio))
        tasks = []
        for number in range(60):
            key = rng.choice(list(alone))
            request = replace(requests[key[0]], ratio=key[1])
            tasks.append((key, asyncio.create_task(service.ids(request))))
            if number % 2:
                # At whatever it is doing: reading the question, loading, waiting, decoding.
                for _ in range(rng.randrange(6)):
                    await asyncio.to_thread(int)
                rng.choice(tasks)[1].cancel()
        outcomes = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        answered = 0
        for (key, _), outcome in zip(tasks, outcomes, strict=True):
            if not isinstance(outcome, asyncio.CancelledError):
                assert outcome == alone[key]
                answered += 1
        assert answered >= 30
        # The engine has seen every cancellation once it has answered one more.
        await service.ids(requests[0])
        stats = service.worker.stats()
        assert stats == replace(
            IDLE, resident_caches=stats.resident_caches, resident_bytes=stats.resident_bytes
        )
        assert 0 < stats.resident_bytes <= 200_000
        assert 0 < stats.resident_caches < 3
        assert await stores.leases.readers(TENANT, requests[0].cache_id) == 0
        for request in requests:
            await service.worker.drop(TENANT, request.cache_id)
        assert service.worker.stats() == IDLE


async def test_a_seed_gives_the_same_answer_in_any_company(service: Service) -> None:
    request = replace(await service.ready(), temperature=1.3, top_p=0.95, top_k=500, max_tokens=12)
    alone = [await service.ids(replace(request, seed=seed)) for seed in range(5)]
    together = await asyncio.gather(
        *(service.ids(replace(request, seed=seed)) for seed in range(5)),
        service.ids(replace(request, question="Something else, greedily?", temperature=0.0)),
    )
    assert list(together[:5]) == alone
    assert len(set(alone)) == 5


async def test_closing_the_iterator_stops_the_generation_within_one_token(
    service: Service,
) -> None:
    request = replace(await service.ready(), max_tokens=1000)
    service.model.batches.clear()
    service.model.hold_after(3)
    async with aclosing(service.worker.query(request)) as events:
        await anext(events)
        await asyncio.to_thread(service.model.wait_until_held)
    assert service.worker.stats().pinned_caches == 0
    service.model.release()
    await service.ids(replace(request, max_tokens=3))
    # Three, the one it was held in, and three of the other question, which was alone.
    assert service.model.batches == [1] * 7


async def test_a_dropped_cache_is_forgotten(service: Service) -> None:
    request = await service.ready()
    assert service.worker.stats().resident_caches == 1
    memory = service.stores.memory
    memory.room(2**22).fill(7)
    assert memory.room(2**22).any()
    await service.worker.drop(TENANT, request.cache_id)
    assert service.worker.stats() == IDLE
    assert not memory.room(2**22).any()
    assert (await service.answer(request)).timings.source == "store"


async def test_stopping_ends_queries_with_an_error_and_builds_with_their_job_in_the_queue(
    service: Service,
) -> None:
    request = replace(await service.ready(), max_tokens=1000)
    service.model.hold_after(2)
    running = asyncio.create_task(service.ids(request))
    await asyncio.to_thread(service.model.wait_until_held)
    wanted = Registration(LONG, AT_THIRD, None, {}, None, None)
    building = await service.registry.register(TENANT, wanted)
    while not service.worker.stats().running_builds:
        await asyncio.to_thread(int)
    stopping = asyncio.create_task(service.worker.stop())
    assert (await service.jobs.next_end()).how == "postponed"
    service.model.release()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await stopping
        with pytest.raises(WorkerUnavailable):
            await running
    assert service.worker.stats() == replace(
        IDLE,
        alive=False,
        resident_caches=1,
        resident_bytes=service.worker.stats().resident_bytes,
    )
    with pytest.raises(WorkerUnavailable):
        await service.answer(request)
    job = await service.jobs.claim("next", 0)
    assert job is not None
    assert (job.context_id, job.attempts) == (building.id, 1)


async def test_preparing_promises_what_is_built(service: Service) -> None:
    prepared = await service.worker.prepare(TENANT, SHORT, AT_THIRD)
    request = await service.ready()
    assert request.cache_id == prepared.fingerprint.digest
    record = await service.stores.metadata.context(TENANT, request.context_id)
    assert record is not None
    assert record.tokens_total == prepared.total_tokens == document_tokens(service.loaded, SHORT)
    # K and V, 2 layers, 2 heads of 16, 4 bytes each.
    assert prepared.full_bytes == 2 * 2 * 2 * 16 * 4 * prepared.total_tokens
    assert record.stored_bytes is not None
    assert record.stored_bytes < prepared.full_bytes
