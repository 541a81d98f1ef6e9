"""Server-sent events: pings while nothing happens, and a last word whatever happens.

One task owns the source from its first item to its close, because a generator may hold
time-outs and leases that belong to the task that opened them.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import structlog
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvkeep_service.api.connection import ClientGone, while_connected
from kvkeep_service.api.errors import CATALOGUE, failure_of
from kvkeep_service.metrics import Metrics
from kvkeep_service.telemetry import where

_log = structlog.get_logger(__name__)

PING_SECONDS: Final = 15.0


def event(name: str, data_json: str) -> bytes:
    """Encode one event whose data is JSON."""
    return format_sse_event(event=name, data_str=data_json)


class Relay:
    """Runs a source of encoded events in a task of its own, one event ahead of the reader."""

    def __init__(
        self, source: AsyncGenerator[bytes, None], ping_seconds: float = PING_SECONDS
    ) -> None:
        """Start at once. `aclose` must follow."""
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._arrived = asyncio.Event()
        self._ping_seconds = ping_seconds
        self._task = asyncio.create_task(self._run(source))

    async def next(self) -> bytes | None:
        """Return the next event; a ping when there is none in time; None at the end.

        Raises: what the source raised.
        """
        if self._queue.empty():
            self._arrived.clear()
            arrival = asyncio.create_task(self._arrived.wait())
            try:
                await asyncio.wait(
                    {arrival, self._task},
                    timeout=self._ping_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                arrival.cancel()
        if not self._queue.empty():
            return self._queue.get_nowait()
        if not self._task.done():
            return KEEPALIVE_COMMENT
        self._task.result()
        return None

    async def aclose(self) -> None:
        """Stop the source and wait until it has let go of everything. Never raises its error."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, source: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(source):
            async for item in source:
                await self._queue.put(item)
                self._arrived.set()


class EventStream(EventSourceResponse):
    """Sends what a relay yields; an error becomes a last ``error`` event with its problem."""

    def __init__(self, relay: Relay, first: bytes | None, request: Request) -> None:
        """``first`` was read from the relay already. The stream closes the relay."""
        super().__init__(
            self._chunks(first), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._relay = relay
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; stop the source when the client goes away first."""
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientGone:
            _log.info("client_gone", path=self._request.url.path)
        finally:
            await self._relay.aclose()

    async def _chunks(self, first: bytes | None) -> AsyncGenerator[bytes, None]:
        item = first
        while item is not None:
            yield item
            try:
                item = await self._relay.next()
            except Exception as error:  # noqa: BLE001  # whatever it was, the client is told
                yield self._last_word(error)
                return

    def _last_word(self, error: Exception) -> bytes:
        failure = failure_of(error)
        metrics: Metrics = self._request.app.state.services.metrics
        metrics.problem(failure.code)
        if CATALOGUE[failure.code].status >= 500:
            _log.warning("stream_failed", code=failure.code, where=where(error))
        problem = failure.problem(self._request.url.path, self._request.state.request_id)
        return event("error", problem.decode("ascii"))


async def start_stream(source: AsyncGenerator[bytes, None], request: Request) -> EventStream:
    """Open a stream once its source has yielded, or a ping's time has passed.

    A source that fails before that still answers with a status of its own.
    Raises: what the source raised; ClientGone.
    """
    relay = Relay(source)
    try:
        first = await while_connected(request.receive, relay.next())
    except BaseException:
        await relay.aclose()
        raise
    return EventStream(relay, first, request)
