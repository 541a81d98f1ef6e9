"""The composition root: the only place that builds objects, and the order they start and stop in.

Stores first, then the model, then the worker, then HTTP; the other way round at the end.
"""

import asyncio
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog
import uvicorn
from fastapi import FastAPI

from kvkeep_service.api.application import build_application
from kvkeep_service.config import Settings
from kvkeep_service.engine.model import LoadedModel, load_model
from kvkeep_service.errors import SettingsInvalid
from kvkeep_service.recovery import Recovery
from kvkeep_service.registry import Registry
from kvkeep_service.stores import Stores
from kvkeep_service.upkeep import Upkeep
from kvkeep_service.worker import LocalWorker
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.sweeper import Sweeper

_log = structlog.get_logger(__name__)

_DRAIN_SECONDS = 30


@asynccontextmanager
async def open_stores(settings: Settings) -> AsyncIterator[Stores]:
    """Open Redis and the object store, the embedded ones where no other is configured.

    Raises: DataDirectoryLocked, MetadataUnavailable, ObjectsUnavailable.
    """
    embedded: EmbeddedStore | None = None
    redis_url, store_url = settings.redis_url, settings.store
    if redis_url is None or store_url is None:
        embedded = EmbeddedStore(settings.data)
    if redis_url is None and embedded is not None:
        await asyncio.to_thread(embedded.start)
        redis_url = embedded.redis_url
    elif embedded is not None:
        (settings.data / "objects").mkdir(mode=0o700, parents=True, exist_ok=True)
    if store_url is None and embedded is not None:
        store_url = embedded.objects_url
    assert redis_url is not None
    assert store_url is not None
    try:
        metadata = await Metadata.connect(redis_url)
        try:
            stores = Stores(metadata, Objects.open(store_url), Leases(metadata), Jobs(metadata))
            if settings.redis_url is None:
                # The directory is ours alone: whoever held these is dead.
                await stores.leases.void_all()
                await stores.jobs.void_owners()
            yield stores
        finally:
            await metadata.close()
    finally:
        if embedded is not None:
            await asyncio.to_thread(embedded.stop)


@asynccontextmanager
async def running_application(
    settings: Settings, loaded: LoadedModel, stores: Stores
) -> AsyncIterator[FastAPI]:
    """The HTTP application with its worker and upkeep running behind it."""
    with suppress(StoreMismatch):
        # Mismatched stores still serve what they can; health says so, and upkeep stands still.
        await bind_if_new(stores.objects, stores.metadata)
    recovery = Recovery(stores, rebuilds=settings.on_corrupt == "rebuild")
    worker = LocalWorker(
        loaded,
        stores,
        recovery,
        owner=f"{socket.gethostname()}-{secrets.token_hex(4)}",
        max_queue=settings.max_queue,
        resident_bytes=settings.resident_bytes,
        threads=settings.threads,
    )
    registry = Registry(stores, worker, default_ttl_seconds=settings.default_ttl_seconds)
    sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, settings.sweep_grace_seconds)
    upkeep = Upkeep(stores, sweeper, worker, interval_seconds=settings.sweep_interval_seconds)
    worker.start()
    upkeep.start()
    try:
        yield build_application(registry, worker, settings)
    finally:
        await upkeep.stop()
        await worker.stop()
        await registry.close()


async def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Run the server until SIGTERM or SIGINT, then drain and return.

    ``announce`` is called once with the URL when requests are answered.
    Raises: StartRefused, and the storage errors of ``open_stores``.
    """
    loaded = await asyncio.to_thread(load_configured_model, settings)
    async with (
        open_stores(settings) as stores,
        running_application(settings, loaded, stores) as app,
    ):
        # uvicorn raises the signal that stopped it again afterwards; we end in our own order.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
        await _AnnouncingServer(config, announce).serve()


def load_configured_model(settings: Settings) -> LoadedModel:
    """Load the model that the settings name. Raises: StartRefused."""
    template = None
    if settings.chat_template is not None:
        template = _read_template(settings.chat_template)
    return load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        model_cache=settings.model_cache,
        reserve_tokens=settings.reserve_tokens,
        chat_template=template,
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"KVKEEP_CHAT_TEMPLATE = {str(path)!r}: cannot be read: {error}"
        raise SettingsInvalid([problem]) from error


class _AnnouncingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announce: Callable[[str], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._announce(f"http://{shown}:{port}")
