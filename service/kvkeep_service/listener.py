"""The port of a server: its own from the first moment on, and never silent."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from kvkeep_service.config import Settings
from kvkeep_service.start_errors import SettingsInvalid

_HAND_OVER_SECONDS = 1


def open_listener(settings: Settings) -> socket.socket:
    """Take the port, and listen: two sockets may be bound to one port until one of them does.

    Raises: SettingsInvalid, when the address cannot be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Named as TCP, or asyncio leaves Nagle's algorithm on: 40 ms a request.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        # Connections of the last server may linger on the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        problem = (
            f"KVKEEP_HOST = {settings.host!r}, KVKEEP_PORT = {settings.port}: {error.strerror}"
        )
        raise SettingsInvalid([problem]) from error
    return listener


def http_config(app: ASGIApp, drain_seconds: int) -> uvicorn.Config:
    """How uvicorn serves any application here; its requests have ``drain_seconds`` at the end."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=drain_seconds,
    )


@asynccontextmanager
async def answering(listener: socket.socket, app: ASGIApp) -> AsyncIterator[None]:
    """Let ``app`` answer for as long as the block runs; then the next one has the listener.

    Who connects in between waits for it. Modifies: nothing of the process's signals.
    """
    config = http_config(app, _HAND_OVER_SECONDS)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Closing this handle leaves the listener, and who waits in its line, alone.
    with listener.dup() as handle:
        await server.startup(sockets=[handle])
        try:
            yield
        finally:
            await server.shutdown(sockets=[handle])
