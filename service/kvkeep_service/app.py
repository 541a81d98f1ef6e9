"""The composition root: the only place that builds objects, and the order they start and stop in.

Stores first, then the model, then the worker, then HTTP; the other way round at the end.
"""

import asyncio
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import structlog
import uvicorn
from fastapi import FastAPI

from kvkeep_service.api.application import build_application
from kvkeep_service.api.starting import starting_application
from kvkeep_service.config import Settings
from kvkeep_service.engine.model import LoadedModel, load_model
from kvkeep_service.engine.self_check import check_attention
from kvkeep_service.free_memory import engine_memory_bytes
from kvkeep_service.head_score_files import read_head_scores
from kvkeep_service.host_tier import HostTier, pinned_memory
from kvkeep_service.listener import answering, http_config
from kvkeep_service.metrics import Metrics
from kvkeep_service.recovery import Recovery
from kvkeep_service.registry import Registry
from kvkeep_service.reservations import UNBOUNDED
from kvkeep_service.sessions import Sessions
from kvkeep_service.start_errors import SettingsInvalid
from kvkeep_service.stores import Stores, open_stores
from kvkeep_service.upkeep import Upkeep
from kvkeep_service.worker import LocalWorker
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.retries import retrying
from kvkeep_storage.sweeper import Sweeper

_log = structlog.get_logger(__name__)

_DRAIN_SECONDS = 30
_LAST_WORDS_SECONDS = 5


@asynccontextmanager
async def running_application(
    settings: Settings, loaded: LoadedModel, stores: Stores
) -> AsyncIterator[tuple[FastAPI, LocalWorker]]:
    """The HTTP application with its worker and upkeep running behind it."""
    try:
        await retrying(partial(bind_if_new, stores.objects, stores.metadata))
    except StoreMismatch as error:
        # Such stores still serve what they can; health says so, and upkeep stands still.
        _log.error(
            "stores_do_not_match",
            detail=str(error),
            advice="stop the server and run: kvkeep-server admin reindex",
        )
    memory_bytes = _memory_bytes(settings, loaded)
    # They take of the same memory, and never most of it.
    session_bytes = min(settings.session_bytes, memory_bytes // 4)
    recovery = Recovery(stores, rebuilds=settings.on_corrupt == "rebuild")
    worker = LocalWorker(
        loaded,
        stores,
        recovery,
        owner=f"{socket.gethostname()}-{secrets.token_hex(4)}",
        max_queue=settings.max_queue,
        resident_bytes=settings.resident_bytes,
        memory_bytes=memory_bytes - session_bytes,
        sessions=Sessions(session_bytes, settings.session_ttl_seconds),
        host=_host_tier(settings, loaded),
        threads=settings.threads,
        head_scores=read_head_scores(settings, loaded.info, loaded.language_model.shape),
        build_slice_seconds=_seconds(settings.build_slice_ms),
        cuda_graphs=settings.cuda_graphs,
    )
    registry = Registry(
        stores,
        worker,
        default_ttl_seconds=settings.default_ttl_seconds,
        stale_seconds=settings.stale_seconds,
    )
    sweeper = Sweeper(
        stores.objects,
        stores.metadata,
        stores.leases,
        settings.sweep_grace_seconds,
        store_bytes=settings.store_bytes,
    )
    upkeep = Upkeep(
        stores,
        sweeper,
        worker,
        registry.repeat_deletions,
        interval_seconds=settings.sweep_interval_seconds,
    )
    metrics = Metrics(worker, upkeep.swept, None if stores.disk is None else stores.disk.stats)
    worker.start()
    upkeep.start()
    try:
        yield build_application(registry, worker, metrics, settings), worker
    finally:
        await upkeep.stop()
        await worker.stop()
        await registry.close()


def _memory_bytes(settings: Settings, loaded: LoadedModel) -> int:
    found = settings.memory_bytes or engine_memory_bytes(loaded.language_model.device)
    _log.info("engine_memory", size_bytes=found, is_set=settings.memory_bytes is not None)
    return UNBOUNDED if found is None else found


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _host_tier(settings: Settings, loaded: LoadedModel) -> HostTier | None:
    """None on a CPU, whose caches are in host memory anyway."""
    if loaded.language_model.device.type != "cuda" or not settings.host_bytes:
        return None
    return HostTier(settings.host_bytes, pinned_memory)


async def serve(
    settings: Settings, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    """Run the server until SIGTERM or SIGINT, then drain and return.

    ``listener`` listens already; it is closed at the end. ``announce`` is called once, with the
    URL, when requests are answered.
    Raises: StartRefused, and the storage errors of ``open_stores``.
    """
    serving = asyncio.create_task(_serve(settings, listener, announce))
    # Until uvicorn has handlers of its own: a Valkey that was started must be stopped.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise


async def _serve(
    settings: Settings, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    loop = asyncio.get_running_loop()
    async with open_stores(settings) as stores:
        loaded = await _loaded(settings, listener)
        async with running_application(settings, loaded, stores) as (app, worker):
            loop.remove_signal_handler(signal.SIGTERM)
            await _serve_http(app, worker, listener, announce)


async def _loaded(settings: Settings, listener: socket.socket) -> LoadedModel:
    """Load the model; meanwhile whoever asks is told so. Raises: StartRefused."""
    async with answering(listener, starting_application(settings.body_limit_bytes)):
        # A thread of its own: the loop would wait for one of its own, for minutes perhaps.
        own = ThreadPoolExecutor(1)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(own, load_configured_model, settings)


async def _serve_http(
    app: FastAPI, worker: LocalWorker, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    # uvicorn raises the signal that stopped it again afterwards; we end in our own order.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    config = http_config(app, _DRAIN_SECONDS)
    await _Server(config, worker, announce).serve(sockets=[listener])


def load_configured_model(settings: Settings) -> LoadedModel:
    """Load the model that the settings name, and try it once. Raises: StartRefused."""
    template = None
    if settings.chat_template is not None:
        template = _read_template(settings.chat_template)
    loaded = load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        model_cache=settings.model_cache,
        reserve_tokens=settings.reserve_tokens,
        chat_template=template,
    )
    check_attention(loaded, settings.model)
    return loaded


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"KVKEEP_CHAT_TEMPLATE = {str(path)!r}: cannot be read: {error}"
        raise SettingsInvalid([problem]) from error


class _Server(uvicorn.Server):
    """Says where it listens, and ends answers that last longer than a drain may, with an error."""

    def __init__(
        self, config: uvicorn.Config, worker: LocalWorker, announce: Callable[[str], None]
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
