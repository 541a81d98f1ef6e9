"""A relay and a stream, without a server: sources that are slow, broken or endless."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

import pytest
from fastapi import FastAPI
from fastapi.sse import KEEPALIVE_COMMENT
from starlette.requests import Request
from starlette.types import Message

from kvkeep_service.api.connection import ClientGone, while_connected
from kvkeep_service.api.events import EventStream, Relay, event
from kvkeep_service.api.requests import Services
from kvkeep_service.errors import Overloaded
from kvkeep_service.metrics import Metrics
from kvkeep_service.ports import Worker
from kvkeep_service.registry import Registry

pytestmark = pytest.mark.anyio

Receive = Callable[[], Awaitable[Message]]


class Source:
    """Counts what it gave and whether it was closed."""

    def __init__(self, *, then: Exception | None = None, endless: bool = False) -> None:
        self.given = 0
        self.closed = asyncio.Event()
        self._then = then
        self._endless = endless

    async def items(self) -> AsyncGenerator[bytes, None]:
        task = asyncio.current_task()
        try:
            for number in range(3):
                self.given += 1
                yield b"%d" % number
                assert asyncio.current_task() is task
            if self._endless:
                await asyncio.Event().wait()
            if self._then is not None:
                raise self._then
        finally:
            assert asyncio.current_task() is task
            self.closed.set()


async def stays() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("never")


async def leaves() -> Message:
    return {"type": "http.disconnect"}


def request() -> Request:
    app = FastAPI()
    # Neither is asked for anything by a stream.
    worker, registry = cast(Worker, None), cast(Registry, None)
    app.state.services = Services(registry, worker, Metrics(worker, {}, None))
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": b""}
    return Request({**scope, "app": app, "server": ("h", 1), "state": {"request_id": "req_1"}})


async def sent(relay: Relay, receive: Receive) -> bytes:
    body = b""

    async def send(message: Message) -> None:
        nonlocal body
        body += message.get("body", b"")

    await EventStream(relay, await relay.next(), request())({"type": "http"}, receive, send)
    return body


async def test_everything_arrives_in_order_and_the_source_is_closed() -> None:
    source = Source()
    assert await sent(Relay(source.items()), stays) == b"012"
    assert source.closed.is_set()


async def test_a_source_that_rests_is_bridged_with_pings() -> None:
    source = Source(endless=True)
    relay = Relay(source.items(), ping_seconds=0.01)
    assert [await relay.next() for _ in range(3)] == [b"0", b"1", b"2"]
    assert [await relay.next() for _ in range(2)] == [KEEPALIVE_COMMENT] * 2
    assert not source.closed.is_set()
    await relay.aclose()
    assert source.closed.is_set()


async def test_an_item_that_the_reader_waits_for_comes_at_once_and_without_pings() -> None:
    async def slow() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            await asyncio.sleep(0.01)
            yield b"%d" % number

    relay = Relay(slow(), ping_seconds=3600)
    async with asyncio.timeout(60):
        assert [await relay.next() for _ in range(4)] == [b"0", b"1", b"2", None]
    await relay.aclose()


async def test_a_source_is_at_most_two_items_ahead_of_the_reader() -> None:
    source = Source()
    relay = Relay(source.items())
    for _ in range(20):
        await asyncio.sleep(0)
    assert source.given == 2
    await relay.aclose()
    assert source.closed.is_set()


@pytest.mark.parametrize(
    ("error", "code"),
    [(Overloaded(3), b'"overloaded"'), (RuntimeError("a secret"), b'"internal"')],
)
async def test_an_error_after_the_first_event_is_the_last_event(
    error: Exception, code: bytes
) -> None:
    body = await sent(Relay(Source(then=error).items()), stays)
    assert body.startswith(b"012event: error\ndata: ")
    assert code in body
    assert b'"request_id": "req_1"' in body
    assert b"secret" not in body


async def test_an_error_that_looks_like_a_late_ping_ends_the_stream() -> None:
    body = await sent(Relay(Source(then=TimeoutError()).items()), stays)
    assert body.count(b"event: error") == 1


async def test_a_client_that_goes_away_closes_the_source() -> None:
    source = Source(endless=True)
    await sent(Relay(source.items()), leaves)
    assert source.closed.is_set()


async def test_work_is_cancelled_when_the_client_goes_away() -> None:
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True

    with pytest.raises(ClientGone):
        await while_connected(leaves, work())
    assert cleaned


async def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def work() -> int:
        return 7

    async def fail() -> int:
        raise Overloaded(3)

    assert await while_connected(stays, work()) == 7
    with pytest.raises(Overloaded):
        await while_connected(stays, fail())


def test_data_with_line_breaks_stays_one_event() -> None:
    assert event("token", '{"text":"a\\nb"}') == b'event: token\ndata: {"text":"a\\nb"}\n\n'
