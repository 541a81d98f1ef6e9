"""A server from its first moment to the loaded model: the port is its own, and it says so."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import httpx2
import pytest

from kvkeep_service.api.starting import starting_application
from kvkeep_service.config import Settings
from kvkeep_service.listener import answering, open_listener
from kvkeep_service.start_errors import SettingsInvalid

pytestmark = pytest.mark.anyio


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[socket.socket]:
    with open_listener(Settings(data=tmp_path, host="127.0.0.1", port=0)) as opened:
        yield opened


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_second_server_is_refused_before_it_loads_anything(
    listener: socket.socket, tmp_path: Path
) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(SettingsInvalid, match=f"KVKEEP_PORT = {port}: Address already in use"):
        open_listener(Settings(data=tmp_path, host="127.0.0.1", port=port))


async def test_a_port_is_free_again_at_once_after_its_server(tmp_path: Path) -> None:
    first = open_listener(Settings(data=tmp_path, host="127.0.0.1", port=0))
    port = first.getsockname()[1]
    async with (
        answering(first, starting_application(1000)),
        # Closed by the server, so that its end of the connection lingers.
        httpx2.AsyncClient(headers={"Connection": "close"}) as client,
    ):
        await client.get(f"{url_of(first)}/health/live")
    first.close()
    open_listener(Settings(data=tmp_path, host="127.0.0.1", port=port)).close()


async def test_while_the_model_is_loaded_it_lives_and_is_not_ready(
    listener: socket.socket,
) -> None:
    app = starting_application(body_limit_bytes=1000)
    async with (
        answering(listener, app),
        httpx2.AsyncClient(base_url=url_of(listener)) as client,
    ):
        live = await client.get("/health/live")
        assert (live.status_code, live.json()) == (200, {"status": "ok", "checks": {}})
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
        asked = await client.post(
            "/contexts?wait=3", json={"document": "words"}, headers={"X-Request-Id": "mine"}
        )
    assert asked.status_code == 503
    assert asked.headers["content-type"] == "application/problem+json"
    assert (asked.json()["code"], asked.json()["request_id"]) == ("worker_unavailable", "mine")
    assert asked.headers["X-Request-Id"] == "mine"
    assert int(asked.headers["Retry-After"]) > 0


async def test_who_connects_as_the_model_is_there_is_answered_by_what_comes_next(
    listener: socket.socket,
) -> None:
    starting, big = starting_application(10**6), starting_application(10)
    async with answering(listener, starting):
        pass
    # Nobody accepts now: the connection waits in the listener's line.
    async with httpx2.AsyncClient(base_url=url_of(listener)) as client:
        asking = asyncio.create_task(client.get("/health/live"))
        await asyncio.sleep(0)
        async with answering(listener, big):
            assert (await asking).status_code == 200


async def test_a_body_that_nobody_reads_does_not_cost_the_answer(
    listener: socket.socket,
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    async with (
        answering(listener, starting_application(1000)),
        httpx2.AsyncClient(base_url=url_of(listener)) as client,
        aclosing(pieces()) as body,
    ):
        response = await client.post("/contexts", content=body)
        assert response.status_code == 503
