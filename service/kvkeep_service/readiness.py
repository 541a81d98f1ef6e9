"""Whether everything a request needs is there: asked, within seconds, each time."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvkeep_service.ports import Worker
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import StorageError
from kvkeep_storage.metadata import Metadata

State = Literal["ok", "degraded", "unavailable"]

_ASK_SECONDS: Final = 5.0


async def readiness(stores: Stores, worker: Worker) -> Mapping[str, State]:
    """Ask worker and stores; no check takes longer than a few seconds.

    ``metadata`` is degraded when Redis reads and refuses writes: questions are answered, nothing
    can be registered, changed or deleted; ``objects`` is, when builds wait for space. ``store`` is
    there when both stores answer, and is degraded when they do not belong together.
    """
    metadata, objects = await asyncio.gather(
        _asked_metadata(stores.metadata), _asked(stores.objects.find_store_id())
    )
    stats = worker.stats()
    is_full = objects.state == "ok" and stats.is_store_full
    checks: dict[str, State] = {
        "worker": "ok" if stats.alive else "unavailable",
        "kernels": "ok" if worker.model.kernels.is_healthy else "degraded",
        "metadata": metadata.state,
        "objects": "degraded" if is_full else objects.state,
    }
    if "unavailable" not in (metadata.state, objects.state):
        is_bound = metadata.store_id is not None and metadata.store_id == objects.store_id
        checks["store"] = "ok" if is_bound else "degraded"
    return checks


@dataclass(frozen=True, slots=True)
class _StoreAnswer:
    state: State
    store_id: str | None


async def _asked(question: Awaitable[str | None]) -> _StoreAnswer:
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            return _StoreAnswer("ok", await question)
    except (StorageError, TimeoutError):
        return _StoreAnswer("unavailable", None)


async def _asked_metadata(metadata: Metadata) -> _StoreAnswer:
    answer = await _asked(metadata.store_id())
    if answer.state != "ok":
        return answer
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            await metadata.probe_writes()
    except (StorageError, TimeoutError):
        return _StoreAnswer("degraded", answer.store_id)
    return answer
