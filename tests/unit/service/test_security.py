import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvkeep_service.api.security import DEFAULT_TENANT, Gate


def ask(
    gate_key: str | None, path: str, authorization: str | None, host: str | None = None
) -> tuple[int, Scope]:
    """Send one request through a gate; return the status, and the scope as it went on."""
    sent: list[Message] = []

    async def beyond(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        raise AssertionError("the body must not be read before the key is checked")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    if host is not None:
        headers.append((b"host", host.encode("latin-1")))
    scope = {"type": "http", "path": path, "headers": headers, "state": {"request_id": "req_1"}}
    asyncio.run(Gate(beyond, gate_key)(scope, receive, send))
    return sent[0]["status"], scope


@pytest.mark.parametrize("authorization", ["Bearer secret-1", "bearer secret-1"])
def test_the_key_opens(authorization: str) -> None:
    status, scope = ask("secret-1", "/contexts", authorization)
    assert status == 200
    assert scope["state"]["tenant"] == DEFAULT_TENANT


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer secret",
        "Bearer secret-12",
        "Bearer SECRET-1",
        "Basic secret-1",
        "secret-1",
        "Bearer  secret-1",
        "Bearer ü",
    ],
)
@pytest.mark.parametrize("path", ["/contexts", "/openapi.json", "/docs", "/version", "/healthy"])
def test_nothing_else_does(authorization: str | None, path: str) -> None:
    status, scope = ask("secret-1", path, authorization)
    assert status == 401
    assert "tenant" not in scope["state"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready"])
def test_health_asks_for_no_key(path: str) -> None:
    assert ask("secret-1", path, None)[0] == 200


def test_a_server_without_a_key_asks_for_none() -> None:
    assert ask(None, "/contexts", None)[0] == 200


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", None]
)
def test_without_a_key_the_server_answers_to_loopback_names(host: str | None) -> None:
    assert ask(None, "/contexts", None, host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.example", "192.168.1.7", "[x"]
)
def test_without_a_key_a_page_of_another_name_is_refused(host: str) -> None:
    status, scope = ask(None, "/contexts", None, host)
    assert status == 403
    assert "tenant" not in scope["state"]


def test_with_a_key_any_name_will_do() -> None:
    assert ask("secret-1", "/contexts", "Bearer secret-1", "kvkeep.example")[0] == 200
