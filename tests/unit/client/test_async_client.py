"""The client for event loops, against the same stand-in as the one that blocks."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvkeep_client import (
    AsyncContext,
    AsyncKVKeep,
    ContextFailed,
    ContextNotFound,
    ServerUnreachable,
    SessionGone,
    StreamInterrupted,
    Unavailable,
)
from kvkeep_client.async_transport import AsyncTransport
from kvkeep_client.calls import get_context

from ...support.servers import unused_url
from .conftest import Served
from .stand_in import StandIn, problem

pytestmark = pytest.mark.anyio


@pytest.fixture
async def akv(served: Served) -> AsyncIterator[AsyncKVKeep]:
    async with AsyncKVKeep(served.url) as kv:
        yield kv


@pytest.fixture
async def context(akv: AsyncKVKeep) -> AsyncContext:
    return await (await akv.contexts.create("some words")).wait()


async def test_a_document_is_registered_awaited_asked_and_deleted(
    server: StandIn, akv: AsyncKVKeep
) -> None:
    context = await akv.contexts.create("some words", name="Lease", ratio=0.2)
    states = [info.status async for info in context.events()]
    assert (states[0], states[-1]) == ("queued", "ready")
    assert (await context.query("When?")).answer == "".join(server.pieces)
    assert await context.document() == "some words"
    assert (await context.update(name="Contract")).name == "Contract"
    assert (await context.prefetch()).status == "ready"
    assert [one.id async for one in akv.contexts.list()] == [context.id]
    assert (await akv.contexts.get(context.id)).name == "Contract"
    await context.delete()
    await akv.contexts.delete(context.id)
    with pytest.raises(ContextNotFound):
        await context.refresh()


async def test_a_build_that_fails_is_raised(server: StandIn, akv: AsyncKVKeep) -> None:
    server.ends_as = "failed"
    with pytest.raises(ContextFailed):
        await (await akv.contexts.create("some words")).wait()


async def test_an_error_that_ends_a_wait_names_the_context(
    server: StandIn, akv: AsyncKVKeep
) -> None:
    server.ends_as = "failed"
    with pytest.raises(ContextFailed) as failed:
        await akv.contexts.create("some words", progress=True)
    assert [failed.value.context_id] == list(server.contexts)


async def test_a_stream_is_its_answer(server: StandIn, context: AsyncContext) -> None:
    stream = await context.stream("When?")
    with pytest.raises(RuntimeError):
        _ = stream.answer
    assert [piece async for piece in stream] == server.pieces
    assert stream.answer.answer == "".join(server.pieces)


async def test_leaving_a_stream_hangs_up(server: StandIn, context: AsyncContext) -> None:
    server.stream_ends_with = "forever"
    async with await context.stream("When?") as stream:
        async for _ in stream:
            break
    assert await asyncio.to_thread(server.hung_up.wait, 30)


@pytest.mark.parametrize(
    ("end", "error"), [("silence", StreamInterrupted), ("break", StreamInterrupted)]
)
async def test_an_answer_that_breaks_off_never_passes_for_whole(
    server: StandIn, context: AsyncContext, end: str, error: type[Exception]
) -> None:
    server.stream_ends_with = end
    with pytest.raises(error):
        _ = [piece async for piece in await context.stream("When?")]


async def test_sessions_go_on_and_fork(server: StandIn, context: AsyncContext) -> None:
    chat = context.session()
    with pytest.raises(ValueError, match="nothing to go on from"):
        chat.fork()
    first = await chat.ask("When?")
    other = chat.fork()
    await other.ask("Where?")
    assert [piece async for piece in await chat.stream("Who?")] == server.pieces
    assert chat.answer_id == server.kept_ever[-1]
    bodies = [seen.body or {} for seen in server.calls("POST") if seen.path.endswith("/query")]
    assert [(body.get("session"), body.get("fork")) for body in bodies] == [
        (None, None),
        (first.id, True),
        (first.id, True),
    ]
    server.kept.clear()
    with pytest.raises(SessionGone):
        await chat.ask("Why?")


async def test_questions_run_at_once(server: StandIn, context: AsyncContext) -> None:
    answers = await asyncio.gather(*(context.query(f"{n}?") for n in range(8)))
    assert {answer.id for answer in answers} == set(server.kept_ever)
    many = await context.query_many(["When?", "Who?"])
    assert [answer.id for answer in many] == server.kept_ever[-2:]


async def test_passing_trouble_is_tried_again_and_lasting_trouble_is_told(
    served: Served, server: StandIn
) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    transport = AsyncTransport(served.url, None, timeout_seconds=30, max_retries=2, sleep=note)
    server.planned = [problem(503, "overloaded", headers={"Retry-After": "3"})] * 3
    with pytest.raises(Unavailable):
        await transport.fields(get_context("ctx_1"))
    assert len(pauses) == 2
    assert min(pauses) >= 3
    await transport.close()
    async with AsyncKVKeep(unused_url(), max_retries=0) as nobody:
        with pytest.raises(ServerUnreachable):
            await nobody.contexts.get("ctx_1")
