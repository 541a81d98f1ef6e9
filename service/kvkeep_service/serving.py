"""A server from its port to its end: the stores, then the model, then HTTP, and back.

What settings and stores refuse is told before torch, which takes seconds, is imported: whatever
needs it is behind ``app.py``.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from kvkeep_service.api.starting import starting_application
from kvkeep_service.config import Settings
from kvkeep_service.listener import answering, http_config
from kvkeep_service.named_files import check_named_files
from kvkeep_service.stores import open_stores

if TYPE_CHECKING:
    from kvkeep_service.engine.model import LoadedModel
    from kvkeep_service.worker import LocalWorker

_DRAIN_SECONDS = 30
_LAST_WORDS_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Announcements:
    """Whom to tell how far the start is; each is called once."""

    loading: Callable[[], None]
    """All but the model is there."""
    ready: Callable[[str], None]
    """Requests are answered, at this URL."""


async def serve(
    settings: Settings, listeners: Sequence[socket.socket], announce: Announcements
) -> None:
    """Run the server until SIGTERM or SIGINT, then drain and return.

    ``listeners`` listen already, and are closed at the end.
    Raises: StartRefused, and the storage errors of ``open_stores``.
    """
    serving = asyncio.create_task(_serve(settings, listeners, announce))
    # Until uvicorn has handlers of its own: a Valkey that was started must be stopped.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise


async def _serve(
    settings: Settings, listeners: Sequence[socket.socket], announce: Announcements
) -> None:
    loop = asyncio.get_running_loop()
    check_named_files(settings)
    async with open_stores(settings) as stores:
        announce.loading()
        loaded = await _loaded(settings, listeners)
        # Not above: it needs torch.
        from kvkeep_service.app import running_application

        async with running_application(settings, loaded, stores) as (app, worker):
            loop.remove_signal_handler(signal.SIGTERM)
            await _serve_http(app, worker, listeners, announce.ready)


async def _loaded(settings: Settings, listeners: Sequence[socket.socket]) -> "LoadedModel":
    """Load the model; meanwhile whoever asks is told so. Raises: StartRefused."""
    async with answering(listeners, starting_application(settings.body_limit_bytes)):
        # A thread of its own: the loop would wait for one of its own, for minutes perhaps.
        own = ThreadPoolExecutor(1)
        return await asyncio.get_running_loop().run_in_executor(own, _load, settings)


def _load(settings: Settings) -> "LoadedModel":
    # Not above: it needs torch.
    from kvkeep_service.app import load_configured_model

    return load_configured_model(settings)


async def _serve_http(
    app: FastAPI,
    worker: "LocalWorker",
    listeners: Sequence[socket.socket],
    announce: Callable[[str], None],
) -> None:
    # uvicorn raises the signal that stopped it again afterwards; we end in our own order.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    config = http_config(app, _DRAIN_SECONDS)
    await _Server(config, worker, announce).serve(sockets=list(listeners))


class _Server(uvicorn.Server):
    """Says where it listens, and ends answers that last longer than a drain may, with an error."""

    def __init__(
        self, config: uvicorn.Config, worker: "LocalWorker", announce: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._announce(f"http://{shown}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        # uvicorn cuts what is left without a word; until then there is time for an error event.
        await asyncio.sleep(_DRAIN_SECONDS - _LAST_WORDS_SECONDS)
        await self._worker.stop()
