"""Sends calls over HTTP without blocking: the twin of ``transport.py``."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

import httpx2

from kvkeep_client.calls import Call
from kvkeep_client.errors import KVKeepError, StreamInterrupted, TimedOut
from kvkeep_client.fields import Fields
from kvkeep_client.sse import Event, EventDecoder
from kvkeep_client.transport import (
    answer_fields,
    base_url,
    body_of,
    build_request,
    failure_of,
    own_headers,
    pause_before_retry,
    reason_of,
    refusal,
)


class AsyncEventStream:
    """An open response of server-sent events. Iterate once; closing it tells the server."""

    def __init__(self, response: httpx2.Response, *, give_up_at: float | None) -> None:
        self._response = response
        self._give_up_at = give_up_at

    @property
    def request_id(self) -> str | None:
        """The id under which the server logs this request."""
        return self._response.headers.get("X-Request-Id")

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events until the server ends the stream. Raises: as ``EventStream``."""
        decoder = EventDecoder()
        try:
            async for chunk in self._response.aiter_bytes():
                for event in decoder.feed(chunk):
                    if event.name == "error":
                        raise refusal(event.data, self._response)
                    yield event
                if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    raise TimedOut("the time allowed for this stream has passed")
        except httpx2.TimeoutException as error:
            raise TimedOut("the server sent nothing within the client's limit") from error
        except httpx2.RequestError as error:
            raise StreamInterrupted(reason_of(error), request_id=self.request_id) from error

    async def close(self) -> None:
        """Hang up. Closing twice is fine."""
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hang up."""
        await self.close()


class AsyncTransport:
    """One connection pool to one server, for one event loop."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        timeout_seconds: float,
        max_retries: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``timeout_seconds`` is the longest silence of the server that is put up with."""
        self.url = url
        self._timeout_seconds = timeout_seconds
        self._max_retries = max_retries
        self._sleep = sleep
        self._http = httpx2.AsyncClient(base_url=base_url(url), headers=own_headers(api_key))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def pause(self, seconds: float) -> None:
        """Wait before asking the server again."""
        await self._sleep(seconds)

    async def fields(self, call: Call) -> Fields:
        """Send a call that is answered with a JSON object."""
        response = await self._send(call, stream=False, timeout_seconds=self._timeout_seconds)
        return answer_fields(self.url, call, response)

    async def nothing(self, call: Call) -> None:
        """Send a call that is answered with no content."""
        await self._send(call, stream=False, timeout_seconds=self._timeout_seconds)

    async def events(self, call: Call, *, give_up_at: float | None = None) -> AsyncEventStream:
        """Send a call that is answered with events; the caller closes the stream.

        ``give_up_at`` is a time of the monotonic clock.
        Raises: like every call, for what goes wrong before the first event.
        """
        limit = self._timeout_seconds
        if give_up_at is not None:
            limit = max(0.001, min(limit, give_up_at - time.monotonic()))
        response = await self._send(call, stream=True, timeout_seconds=limit)
        return AsyncEventStream(response, give_up_at=give_up_at)

    async def _send(self, call: Call, *, stream: bool, timeout_seconds: float) -> httpx2.Response:
        attempt = 0
        while True:
            outcome = await self._send_once(call, stream=stream, timeout_seconds=timeout_seconds)
            if isinstance(outcome, httpx2.Response):
                return outcome
            pause = pause_before_retry(outcome, attempt)
            if pause is None or attempt >= self._max_retries:
                raise outcome
            await self._sleep(pause)
            attempt += 1

    async def _send_once(
        self, call: Call, *, stream: bool, timeout_seconds: float
    ) -> httpx2.Response | KVKeepError:
        request = build_request(self._http, call, timeout_seconds)
        try:
            response = await self._http.send(request, stream=stream)
            if response.is_success:
                return response
            await response.aread()
        except httpx2.RequestError as error:
            failure = failure_of(self.url, call, error, timeout_seconds)
            failure.__cause__ = error
            return failure
        return refusal(body_of(response), response)
