"""Sends calls over HTTP: retries, time limits, and every failure as one of our errors.

This file and its twin, ``async_transport.py``, alone know httpx2.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from types import TracebackType
from typing import Self

import httpx2

from kvkeep_client.calls import Call
from kvkeep_client.errors import (
    APIError,
    KVKeepError,
    Problem,
    ServerUnreachable,
    StreamInterrupted,
    TimedOut,
    UnexpectedResponse,
    error_for,
)
from kvkeep_client.fields import Fields
from kvkeep_client.sendable import header_text
from kvkeep_client.sse import Event, EventDecoder

CONNECT_SECONDS = 5.0
FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 8.0
# A server that asks for a longer pause than this gets its error reported instead.
MAX_RETRY_AFTER_SECONDS = 60.0


class EventStream:
    """An open response of server-sent events. Iterate once; closing it tells the server."""

    def __init__(self, response: httpx2.Response, *, give_up_at: float | None) -> None:
        self._response = response
        self._give_up_at = give_up_at

    @property
    def request_id(self) -> str | None:
        """The id under which the server logs this request."""
        return self._response.headers.get("X-Request-Id")

    def __iter__(self) -> Iterator[Event]:
        """Yield events until the server ends the stream.

        Raises: APIError, for an ``error`` event; StreamInterrupted; TimedOut, when the deadline
            passes or the server shows no sign of life.
        """
        decoder = EventDecoder()
        try:
            for chunk in self._response.iter_bytes():
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

    def close(self) -> None:
        """Hang up. Closing twice is fine."""
        self._response.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hang up."""
        self.close()


class Transport:
    """One connection pool to one server. Threads may share it."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        timeout_seconds: float,
        max_retries: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``timeout_seconds`` is the longest silence of the server that is put up with."""
        self.url = url
        self._timeout_seconds = timeout_seconds
        self._max_retries = max_retries
        self._sleep = sleep
        self._http = httpx2.Client(base_url=base_url(url), headers=own_headers(api_key))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def pause(self, seconds: float) -> None:
        """Wait before asking the server again."""
        self._sleep(seconds)

    def fields(self, call: Call) -> Fields:
        """Send a call that is answered with a JSON object."""
        response = self._send(call, stream=False, timeout_seconds=self._timeout_seconds)
        return answer_fields(self.url, call, response)

    def nothing(self, call: Call) -> None:
        """Send a call that is answered with no content."""
        self._send(call, stream=False, timeout_seconds=self._timeout_seconds)

    def events(self, call: Call, *, give_up_at: float | None = None) -> EventStream:
        """Send a call that is answered with events; the caller closes the stream.

        ``give_up_at`` is a time of the monotonic clock.
        Raises: like every call, for what goes wrong before the first event.
        """
        limit = self._timeout_seconds
        if give_up_at is not None:
            limit = max(0.001, min(limit, give_up_at - time.monotonic()))
        return EventStream(
            self._send(call, stream=True, timeout_seconds=limit), give_up_at=give_up_at
        )

    def _send(self, call: Call, *, stream: bool, timeout_seconds: float) -> httpx2.Response:
        attempt = 0
        while True:
            outcome = self._send_once(call, stream=stream, timeout_seconds=timeout_seconds)
            if isinstance(outcome, httpx2.Response):
                return outcome
            pause = pause_before_retry(outcome, attempt)
            if pause is None or attempt >= self._max_retries:
                raise outcome
            self._sleep(pause)
            attempt += 1

    def _send_once(
        self, call: Call, *, stream: bool, timeout_seconds: float
    ) -> httpx2.Response | KVKeepError:
        request = build_request(self._http, call, timeout_seconds)
        try:
            response = self._http.send(request, stream=stream)
            if response.is_success:
                return response
            response.read()
        except httpx2.RequestError as error:
            failure = failure_of(self.url, call, error, timeout_seconds)
            failure.__cause__ = error
            return failure
        return refusal(body_of(response), response)


def base_url(url: str) -> httpx2.URL:
    """Where a server answers. Raises: ValueError, for an address that nobody can have."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"the server's URL {url!r} cannot be read: {error}") from error
    if not parsed.host:
        raise ValueError(f"the server's URL {url!r} names no host")
    return parsed


def own_headers(api_key: str | None) -> dict[str, str]:
    """What every request says of the client. Raises: TypeError, ValueError, naming the key."""
    headers = {"User-Agent": f"kvkeep-client/{version('kvkeep-client')}"}
    if api_key:
        headers["Authorization"] = f"Bearer {header_text(api_key, 'api_key')}"
    return headers


def build_request(
    http: httpx2.Client | httpx2.AsyncClient, call: Call, timeout_seconds: float
) -> httpx2.Request:
    """A call as a request."""
    return http.build_request(
        call.method,
        call.path,
        params=dict(call.params),
        headers=dict(call.headers),
        content=call.body,
        timeout=httpx2.Timeout(timeout_seconds, connect=CONNECT_SECONDS),
    )


def answer_fields(url: str, call: Call, response: httpx2.Response) -> Fields:
    """The JSON object of an answer that was read. Raises: UnexpectedResponse."""
    try:
        value = response.json()
    except ValueError as error:
        raise UnexpectedResponse(
            f"{url} answered {call.method} {call.path} with something else than JSON;"
            " is it a kvkeep server?",
            status=response.status_code,
            request_id=response.headers.get("X-Request-Id"),
        ) from error
    return Fields.of(value, "answer")


def failure_of(
    url: str, call: Call, error: httpx2.RequestError, timeout_seconds: float
) -> KVKeepError:
    """What an error of the network means for a call."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return ServerUnreachable(url, reason_of(error))
    if isinstance(error, httpx2.TimeoutException):
        return TimedOut(f"{call.method} {call.path}: no answer within {timeout_seconds:g} seconds")
    return StreamInterrupted(reason_of(error))


def pause_before_retry(failure: KVKeepError, attempt: int) -> float | None:
    """Return the seconds to wait before the next attempt; None when there is to be none."""
    if not failure.is_retried:
        return None
    backoff = min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0**attempt)
    # Clients that failed together should not come back together.
    backoff *= random.uniform(0.5, 1.0)
    asked = failure.retry_after_seconds if isinstance(failure, APIError) else None
    if asked is None:
        return backoff
    return None if asked > MAX_RETRY_AFTER_SECONDS else max(asked, backoff)


def body_of(response: httpx2.Response) -> Fields:
    """Return the problem body; an empty object when the answer is not kvkeep's."""
    try:
        value = json.loads(response.content)
    except ValueError:
        value = None
    return Fields(value if isinstance(value, dict) else {}, "problem")


def refusal(body: Fields, response: httpx2.Response) -> APIError:
    """The error that a problem body, or a bare status, stands for."""
    named = {"type", "title", "status", "detail", "instance", "code", "request_id"}
    values = body.values
    status = values.get("status")
    # An error event arrives under status 200: the body knows better.
    status = status if isinstance(status, int) else response.status_code
    code, detail = values.get("code"), values.get("detail")
    if not isinstance(detail, str):
        detail = f"the server answered {status}"
    if status == 404 and code in (None, "not_found"):
        detail = _about_path(response.request.url)
    request_id = values.get("request_id") or response.headers.get("X-Request-Id")
    return error_for(
        Problem(
            status=status,
            code=code if isinstance(code, str) else f"http_{status}",
            detail=detail,
            request_id=str(request_id) if request_id else None,
            retry_after_seconds=_retry_after(response.headers.get("Retry-After")),
            facts={name: value for name, value in values.items() if name not in named},
        )
    )


def _about_path(asked: httpx2.URL) -> str:
    """What to think of first when a server does not know a path at all."""
    nothing = f"there is nothing at {asked.copy_with(query=None)}"
    above = asked.path.partition("/contexts")[0]
    if above:
        return f"{nothing}: is {above} part of the server's URL, or to be left out of it?"
    return f"{nothing}: is it a kvkeep server?"


def _retry_after(header: str | None) -> float | None:
    """Read a Retry-After header, in seconds or as a date; None for anything else."""
    if header is None:
        return None
    if header.strip().isdigit():
        return float(header)
    try:
        seconds = parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
        return None
    return max(0.0, seconds)


def reason_of(error: Exception) -> str:
    """What the network said."""
    return str(error) or type(error).__name__
