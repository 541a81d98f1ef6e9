"""What surrounds every request: its id, its log line, the limit on its body, the last resort."""

import re
import time
from collections.abc import Callable
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep_service.api.connection import ClientGone
from kvkeep_service.api.errors import failure_of
from kvkeep_service.api.refusals import BodyTooLarge
from kvkeep_service.telemetry import where

_log = structlog.get_logger(__name__)

REQUEST_ID: Final = "X-Request-Id"
_REQUEST_ID_SHAPE: Final = re.compile(r"[\x21-\x7e]{1,128}")


class Envelope:
    """Outermost middleware. Every response carries ``X-Request-Id``; none shows a stack."""

    def __init__(self, app: ASGIApp, body_limit_bytes: int, make_id: Callable[[], str]) -> None:
        """``make_id`` names the requests that came without a usable id."""
        self._app = app
        self._body_limit_bytes = body_limit_bytes
        self._make_id = make_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; anything but HTTP passes untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._body_limit_bytes)
        given = exchange.request_headers.get(REQUEST_ID, "")
        exchange.request_id = given if _REQUEST_ID_SHAPE.fullmatch(given) else self._make_id()
        scope.setdefault("state", {})["request_id"] = exchange.request_id
        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id):
            await self._serve(exchange)

    async def _serve(self, exchange: "_Exchange") -> None:
        began = time.perf_counter()
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except ClientGone:
            # Nobody reads this; the status is for the log.
            exchange.status = 499
        except Exception as error:
            _log.error("unforeseen_error", where=where(error))
            if exchange.status is not None:
                raise  # Too late for a status: the server cuts the connection.
            failure = failure_of(error)
            response = failure.response(exchange.scope["path"], exchange.request_id)
            await response(exchange.scope, exchange.receive, exchange.send)
        finally:
            _log.info(
                "request",
                method=exchange.scope["method"],
                path=exchange.scope["path"],
                status=exchange.status,
                seconds=round(time.perf_counter() - began, 4),
            )


class _Exchange:
    """One request on its way: counts what comes in, and marks what goes out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, body_limit_bytes: int) -> None:
        self.scope = scope
        self.request_id = ""
        self.status: int | None = None
        self.request_headers = Headers(scope=scope)
        self._receive = receive
        self._send = send
        self._limit_bytes = body_limit_bytes
        self._read_bytes = 0

    async def receive(self) -> Message:
        if self._read_bytes == 0 and self._declared_bytes() > self._limit_bytes:
            # One that asked first (Expect) has sent nothing yet, and is told at once.
            raise await self._too_large(more="expect" not in self.request_headers)
        message = await self._receive()
        self._read_bytes += len(message.get("body", b""))
        if self._read_bytes > self._limit_bytes:
            raise await self._too_large(more=message.get("more_body", False))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)

    async def _too_large(self, *, more: bool) -> BodyTooLarge:
        # A client that is still sending would see a reset connection instead of the answer, so
        # as much again is read and thrown away.
        while more and self._read_bytes <= 2 * self._limit_bytes:
            message = await self._receive()
            self._read_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
        return BodyTooLarge(self._limit_bytes)

    def _declared_bytes(self) -> int:
        declared = self.request_headers.get("content-length", "")
        return int(declared) if declared.isdecimal() else 0
