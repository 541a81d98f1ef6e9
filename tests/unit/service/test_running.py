"""A query on the event loop: every piece once and in order, its end whatever that is."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.errors import Overloaded, WorkerUnavailable
from kvkeep_service.ports import QueryRequest, TokenEvent
from kvkeep_service.residency import Pinned
from kvkeep_service.running import RunningQuery, run

from .engine.gated import PATIENCE_SECONDS, WORDS, GatedModel, sequence
from .engine.models import VOCABULARY, engine_model, random_document, run_build, stock_model

pytestmark = pytest.mark.anyio

REQUEST = QueryRequest("acme", "ctx", "cache", 1.0, "?")


@pytest.fixture(scope="module")
def model() -> GatedModel:
    return GatedModel(engine_model(stock_model("llama")))


@pytest.fixture(scope="module")
def context(model: GatedModel) -> ResidentContext:
    return run_build(model, random_document(40), None, (1.0,)).context


@pytest.fixture
def scheduler(model: GatedModel) -> Iterator[Scheduler]:
    started = Scheduler(model, max_waiting=1)
    started.start()
    yield started
    model.release()
    assert started.stop(PATIENCE_SECONDS)


@pytest.fixture
def asked(model: GatedModel, context: ResidentContext) -> Sequence:
    return sequence(model, context.view(1.0), [1, 2, 3], SequenceOptions(9))


async def test_pieces_come_in_order_and_are_the_answer(
    scheduler: Scheduler, asked: Sequence, context: ResidentContext
) -> None:
    running = RunningQuery(asked, received_at=time.perf_counter())
    events = [event async for event in _events(running, scheduler)]
    answer = running.answer(Pinned(context, 1.0, "store", 0.25), REQUEST, None, str)
    assert [event.index for event in events] == list(range(len(events)))
    assert all(event.text for event in events)
    assert answer.text == "".join(event.text for event in events) == WORDS.decode(asked.generated)
    assert (answer.finish_reason, answer.completion_tokens, answer.ratio) == ("length", 9, 1.0)
    assert (answer.prompt_tokens, answer.cached_tokens) == (48, 45)
    assert (answer.token_ids, answer.prompt_token_ids) == (None, None)
    timings = answer.timings
    assert (timings.source, timings.load_ms) == ("store", 250.0)
    assert timings.ttft_ms >= timings.queue_ms + timings.prefill_ms > 0
    assert timings.decode_tps > 0


async def test_token_ids_are_given_to_who_asks_for_them(
    scheduler: Scheduler, asked: Sequence, context: ResidentContext
) -> None:
    running = RunningQuery(asked, received_at=time.perf_counter())
    async for _ in _events(running, scheduler):
        pass
    request = replace(REQUEST, return_token_ids=True)
    answer = running.answer(Pinned(context, 1.0, "resident", 0.0), request, [50, 60], str)
    assert answer.token_ids == tuple(asked.generated)
    assert answer.prompt_token_ids == (50, 60, 1, 2, 3)
    without = running.answer(Pinned(context, 1.0, "resident", 0.0), request, None, str)
    assert (without.token_ids, without.prompt_token_ids) == (answer.token_ids, None)


async def test_an_answer_of_one_token_has_no_rate(
    scheduler: Scheduler, model: GatedModel, context: ResidentContext
) -> None:
    one = sequence(model, context.view(1.0), [1], SequenceOptions(1))
    running = RunningQuery(one, received_at=time.perf_counter())
    async for _ in _events(running, scheduler):
        pass
    assert (
        running.answer(Pinned(context, 1.0, "store", 0), REQUEST, None, str).timings.decode_tps
        == 0.0
    )


async def test_closing_the_iterator_ends_the_sequence_within_one_token(
    scheduler: Scheduler, model: GatedModel, context: ResidentContext
) -> None:
    long = sequence(model, context.view(1.0), [1], SequenceOptions(1000))
    model.hold_after(4)
    running = RunningQuery(long, received_at=0.0)
    async with aclosing(_events(running, scheduler)) as events:
        await anext(events)
        await asyncio.to_thread(model.wait_until_held)
    model.release()
    await _one_more_query(scheduler, model, context)
    assert len(long.generated) == 5


async def test_cancelling_the_reader_ends_the_sequence_too(
    scheduler: Scheduler, model: GatedModel, context: ResidentContext
) -> None:
    long = sequence(model, context.view(1.0), [1], SequenceOptions(1000))
    model.hold_after(4)

    async def read() -> None:
        running = RunningQuery(long, received_at=0.0)
        async with aclosing(_events(running, scheduler)) as events:
            async for _ in events:
                pass

    reader = asyncio.create_task(read())
    await asyncio.to_thread(model.wait_until_held)
    reader.cancel()
    await asyncio.wait([reader])
    model.release()
    await _one_more_query(scheduler, model, context)
    assert len(long.generated) == 5


async def test_what_ends_the_sequence_in_the_engine_reaches_the_reader(
    scheduler: Scheduler, model: GatedModel, context: ResidentContext
) -> None:
    bad = sequence(model, context.view(1.0), [VOCABULARY + 1], SequenceOptions(2))
    with pytest.raises(IndexError):
        async for _ in _events(RunningQuery(bad, received_at=0.0), scheduler):
            pass


async def test_a_reader_is_told_when_the_engine_stops(
    model: GatedModel, context: ResidentContext
) -> None:
    scheduler = Scheduler(model, max_waiting=1)
    scheduler.start()
    model.hold_after(2)
    long = sequence(model, context.view(1.0), [1], SequenceOptions(1000))
    events = _events(RunningQuery(long, received_at=0.0), scheduler)
    await anext(events)
    assert not scheduler.stop(deadline_seconds=0)
    model.release()
    with pytest.raises(WorkerUnavailable):
        async for _ in events:
            pass
    assert await asyncio.to_thread(scheduler.stop, PATIENCE_SECONDS)


async def test_a_refused_query_says_so_at_once(
    scheduler: Scheduler, model: GatedModel, context: ResidentContext, asked: Sequence
) -> None:
    model.hold_after(0)
    queries = []
    for number in range(2):
        running = RunningQuery(
            sequence(model, context.view(1.0), [number], SequenceOptions(1)), received_at=0.0
        )
        queries.append(asyncio.create_task(_read(running, scheduler)))
        await asyncio.to_thread(model.wait_until_held)
    with pytest.raises(Overloaded):
        await anext(_events(RunningQuery(asked, received_at=0.0), scheduler))
    model.release()
    assert [len(await query) for query in queries] == [1, 1]


def test_news_for_a_loop_that_was_closed_does_not_harm_the_engine(
    scheduler: Scheduler, model: GatedModel, context: ResidentContext
) -> None:
    model.hold_after(1)

    async def begin_and_leave() -> None:
        long = sequence(model, context.view(1.0), [1], SequenceOptions(5))
        events = _events(RunningQuery(long, received_at=0.0), scheduler)
        await anext(events)
        await asyncio.to_thread(model.wait_until_held)
        # Left open: its loop ends first, as in a process that is told to end at once.
        left.append(events)

    left: list[object] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin_and_leave())
    loop.close()
    model.release()
    asyncio.run(_one_more_query(scheduler, model, context))
    assert scheduler.stats().is_alive


async def _events(query: RunningQuery, scheduler: Scheduler) -> AsyncGenerator[TokenEvent]:
    """What comes of a query that is asked alone."""
    async with aclosing(run([query], scheduler)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                yield event


async def _read(running: RunningQuery, scheduler: Scheduler) -> list[str]:
    return [event.text async for event in _events(running, scheduler)]


async def _one_more_query(
    scheduler: Scheduler, model: GatedModel, context: ResidentContext
) -> None:
    """Return once the engine has seen all that was asked, or cancelled, before."""
    # Three tokens: whoever still runs beside it gets two more at least.
    one = sequence(model, context.view(1.0), [1], SequenceOptions(3))
    assert len(await _read(RunningQuery(one, received_at=0.0), scheduler)) == 3
