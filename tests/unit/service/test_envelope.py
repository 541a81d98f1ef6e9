"""The envelope alone: ids, the body limit while it streams, and the last resort."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvkeep_service.api.connection import ClientGone
from kvkeep_service.api.envelope import Envelope
from kvkeep_service.api.refusals import BodyTooLarge

LIMIT = 10


@dataclass
class Exchange:
    """One request with a body in chunks, and what became of it."""

    chunks: list[bytes] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    received: int = 0

    def through(self, app: "App", limit: int = LIMIT) -> "Exchange":
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/contexts",
            "headers": [(k.encode(), v.encode()) for k, v in self.headers.items()],
        }
        asyncio.run(Envelope(app, limit, lambda: "req_made")(scope, self._receive, self._send))
        return self

    async def _receive(self) -> Message:
        chunk = self.chunks[self.received]
        self.received += 1
        more = self.received < len(self.chunks)
        return {"type": "http.request", "body": chunk, "more_body": more}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def request_id(self) -> str:
        headers = dict(self.sent[0]["headers"])
        return str(headers[b"x-request-id"].decode())


class App:
    """Reads the whole body, as FastAPI does, then answers or fails."""

    def __init__(self, error: Exception | None = None, *, late: bool = False) -> None:
        self.body = b""
        self.refusal: BodyTooLarge | None = None
        self._error = error
        self._late = late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            more = True
            while more:
                message = await receive()
                self.body += message["body"]
                more = message["more_body"]
        except BodyTooLarge as error:
            self.refusal = error
            return
        if self._error is not None and not self._late:
            raise self._error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("given", ["req_given", "a", "x" * 128, "!~"])
def test_a_given_request_id_comes_back(given: str) -> None:
    assert Exchange([b""], {"x-request-id": given}).through(App()).request_id == given


@pytest.mark.parametrize("given", ["", "x" * 129, "with space", "tab\t"])
def test_an_unusable_request_id_is_replaced(given: str) -> None:
    assert Exchange([b""], {"x-request-id": given}).through(App()).request_id == "req_made"


def test_a_body_at_the_limit_passes() -> None:
    app = App()
    Exchange([b"12345", b"67890"]).through(app)
    assert app.body == b"1234567890"


def test_a_body_is_refused_while_it_streams_whatever_it_declares() -> None:
    app = App()
    exchange = Exchange([b"12345", b"678901", b"rest"], {"content-length": "4"}).through(app)
    assert app.refusal is not None
    assert app.refusal.limit_bytes == LIMIT
    assert app.body == b"12345"
    assert exchange.received == 3


def test_a_declared_body_over_the_limit_never_reaches_the_application() -> None:
    app = App()
    Exchange([b"12345678901"], {"content-length": "11"}).through(app)
    assert app.refusal is not None
    assert app.body == b""


def test_only_so_much_of_a_refused_body_is_read_and_thrown_away() -> None:
    exchange = Exchange([b"123456"] * 100).through(App())
    assert exchange.received == 4


def test_a_client_that_asks_first_is_told_before_it_sends() -> None:
    app = App()
    headers = {"content-length": "11", "expect": "100-continue"}
    exchange = Exchange([b"12345678901"], headers).through(app)
    assert app.refusal is not None
    assert exchange.received == 0


def test_an_unforeseen_error_is_a_problem_without_a_stack() -> None:
    exchange = Exchange([b""]).through(App(RuntimeError("a secret of the document")))
    problem = json.loads(exchange.sent[1]["body"])
    assert (exchange.status, problem["code"]) == (500, "internal")
    assert problem["request_id"] == exchange.request_id == "req_made"
    assert "secret" not in exchange.sent[1]["body"].decode()


def test_after_the_first_byte_an_error_cuts_the_connection() -> None:
    with pytest.raises(RuntimeError):
        Exchange([b""]).through(App(RuntimeError("broken"), late=True))


def test_a_client_that_is_gone_is_sent_nothing() -> None:
    assert Exchange([b""]).through(App(ClientGone())).sent == []


@pytest.fixture(autouse=True)
def _silence(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "secret" not in "".join(capsys.readouterr())
