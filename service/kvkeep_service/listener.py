"""The port of a server: its own from the first moment on, and never silent."""

import errno
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from kvkeep_service.config import Settings
from kvkeep_service.start_errors import SettingsInvalid

_HAND_OVER_SECONDS = 1
# What a machine without IPv6, or with an address of an interface that is down, says.
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
# A free port of one address may be taken at the other.
_TRIES: Final = 8


@contextmanager
def listening(settings: Settings) -> Iterator[Sequence[socket.socket]]:
    """Take the port at every address of the host, and listen for the length of a ``with`` block.

    A name such as localhost may have two; those that this machine does not have are left out.
    IPv4 comes first. Raises: SettingsInvalid, when none can be had, or one is in use.
    """
    try:
        listeners = _open(settings)
    except OSError as error:
        problem = (
            f"KVKEEP_HOST = {settings.host!r}, KVKEEP_PORT = {settings.port}: {error.strerror}"
        )
        raise SettingsInvalid([problem]) from error
    with ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        yield listeners


def _open(settings: Settings) -> list[socket.socket]:
    found = socket.getaddrinfo(
        settings.host.strip("[]"), None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    addresses = sorted({(family, address) for family, _, _, _, address in found})
    for _ in range(_TRIES - 1):
        try:
            return _open_all(addresses, settings.port)
        except OSError as error:
            if settings.port or error.errno != errno.EADDRINUSE:
                raise
    return _open_all(addresses, settings.port)


def _open_all(addresses: Sequence[tuple[int, Any]], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    with ExitStack() as opened:
        for family, address in addresses:
            try:
                listener = _listener(family, (address[0], port, *address[2:]), len(addresses) > 1)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
                continue
            opened.enter_context(listener)
            listeners.append(listener)
            port = listener.getsockname()[1]
        if missing is not None and not listeners:
            raise missing
        opened.pop_all()
    return listeners


def _listener(family: int, address: Any, is_one_of_several: bool) -> socket.socket:
    # Named as TCP, or asyncio leaves Nagle's algorithm on: 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Connections of the last server may linger on the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and is_one_of_several:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Two sockets may be bound to one port until one of them listens.
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
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
async def answering(listeners: Sequence[socket.socket], app: ASGIApp) -> AsyncIterator[None]:
    """Let ``app`` answer for as long as the block runs; then the next one has the listeners.

    Who connects in between waits for it. Modifies: nothing of the process's signals.
    """
    config = http_config(app, _HAND_OVER_SECONDS)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with ExitStack() as opened:
        # Closing these handles leaves the listeners, and who waits in their lines, alone.
        handles = [opened.enter_context(listener.dup()) for listener in listeners]
        await server.startup(sockets=handles)
        try:
            yield
        finally:
            await server.shutdown(sockets=handles)
