"""The composition root: the only place that builds objects, and the order they start and stop in.

``serving.py`` brings the stores before, and HTTP after.
"""

import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog
from fastapi import FastAPI

from kvkeep_service.api.application import build_application
from kvkeep_service.config import Settings
from kvkeep_service.engine.model import LoadedModel, load_model
from kvkeep_service.engine.self_check import check_attention
from kvkeep_service.free_memory import engine_memory_bytes
from kvkeep_service.head_score_files import read_head_scores
from kvkeep_service.host_tier import HostTier, pinned_memory
from kvkeep_service.metrics import Metrics
from kvkeep_service.named_files import read_chat_template
from kvkeep_service.recovery import Recovery
from kvkeep_service.registry import Registry
from kvkeep_service.reservations import UNBOUNDED
from kvkeep_service.sessions import Sessions
from kvkeep_service.stores import Stores
from kvkeep_service.upkeep import Upkeep
from kvkeep_service.worker import LocalWorker
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.retries import retrying
from kvkeep_storage.sweeper import Sweeper

_log = structlog.get_logger(__name__)


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


def load_configured_model(settings: Settings) -> LoadedModel:
    """Load the model that the settings name, and try it once. Raises: StartRefused."""
    template = None
    if settings.chat_template is not None:
        template = read_chat_template(settings.chat_template)
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
