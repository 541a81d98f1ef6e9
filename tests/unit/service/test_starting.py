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
from kvkeep_service.listener import answering, listening
from kvkeep_service.start_errors import SettingsInvalid

pytestmark = pytest.mark.anyio


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[socket.socket]:
    with listening(Settings(data=tmp_path, host="127.0.0.1", port=0)) as (opened,):
        yield opened


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_second_server_is_refused_before_it_loads_anything(
    listener: socket.socket, tmp_path: Path
) -> None:
    port = listener.getsockname()[1]
    said = f"KVKEEP_PORT = {port}: Address already in use"
    with (
        pytest.raises(SettingsInvalid, match=said),
        listening(Settings(data=tmp_path, host="127.0.0.1", port=port)),
    ):
        pass


async def test_a_port_is_free_again_at_once_after_its_server(tmp_path: Path) -> None:
    with listening(Settings(data=tmp_path, host="127.0.0.1", port=0)) as (first,):
        port = first.getsockname()[1]
        async with (
            answering([first], starting_application(1000)),
            # Closed by the server, so that its end of the connection lingers.
            httpx2.AsyncClient(headers={"Connection": "close"}) as client,
        ):
            await client.get(f"{url_of(first)}/health/live")
    with listening(Settings(data=tmp_path, host="127.0.0.1", port=port)) as again:
        assert len(again) == 1


async def test_a_name_with_two_addresses_is_served_at_both_on_one_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "localhost"
        # This machine may have no IPv6: of such an address, nothing is made.
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
        fours = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
            for address in ("127.0.0.2", "127.0.0.1")
        ]
        return [six, *fours]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", resolved)
        opened = listening(Settings(data=tmp_path, host="localhost", port=0))
        listeners = opened.__enter__()
    try:
        names = [listener.getsockname()[:2] for listener in listeners]
        (port,) = {port for _, port in names}
        assert names[:2] == [("127.0.0.1", port), ("127.0.0.2", port)]
        async with (
            answering(listeners, starting_application(1000)),
            httpx2.AsyncClient() as client,
        ):
            for host, _ in names:
                shown = f"[{host}]" if ":" in host else host
                live = await client.get(f"http://{shown}:{port}/health/live")
                assert live.status_code == 200
    finally:
        opened.__exit__(None, None, None)


async def test_a_host_that_this_machine_does_not_have_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsInvalid, match=r"KVKEEP_HOST = '192\.0\.2\.1', KVKEEP_PORT = 0: "),
        listening(Settings(data=tmp_path, host="192.0.2.1", port=0, api_key="secret-1")),
    ):
        pass


async def test_while_the_model_is_loaded_it_lives_and_is_not_ready(
    listener: socket.socket,
) -> None:
    app = starting_application(body_limit_bytes=1000)
    async with (
        answering([listener], app),
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
    async with answering([listener], starting):
        pass
    # Nobody accepts now: the connection waits in the listener's line.
    async with httpx2.AsyncClient(base_url=url_of(listener)) as client:
        asking = asyncio.create_task(client.get("/health/live"))
        await asyncio.sleep(0)
        async with answering([listener], big):
            assert (await asking).status_code == 200


async def test_a_body_that_nobody_reads_does_not_cost_the_answer(
    listener: socket.socket,
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    async with (
        answering([listener], starting_application(1000)),
        httpx2.AsyncClient(base_url=url_of(listener)) as client,
        aclosing(pieces()) as body,
    ):
        response = await client.post("/contexts", content=body)
        assert response.status_code == 503
