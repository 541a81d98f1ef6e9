"""A registration to make, a store to break, and what to look at afterwards."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep_service.ports import CompressionSpec, DocumentSpec
from kvkeep_service.registration import Registration
from kvkeep_service.registry import Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import MetadataUnavailable

from .scripted_worker import ScriptedWorker
from .stores import files_below

WANTED = Registration(
    document=DocumentSpec("This agreement ends on 31 March 2029."),
    compression=CompressionSpec(),
    name="Agreement",
    metadata={"matter": "2291"},
    model=None,
    expires=None,
)

AWAY = MetadataUnavailable("redis", "away")


async def built(registry: Registry, worker: ScriptedWorker, wanted: Registration = WANTED) -> str:
    """Register a document and build its cache; return the id of the context."""
    record = await registry.register("default", wanted)
    builds = asyncio.create_task(worker.run_builds())
    await registry.finished("default", record.id, 30)
    builds.cancel()
    await asyncio.gather(builds, return_exceptions=True)
    return record.id


def stored(tmp_path: Path) -> list[str]:
    return [name for name in files_below(tmp_path) if name.endswith(".json")]


def breaking(
    stores: Stores, store: str, method: str, error: BaseException, after: int = 0
) -> Stores:
    """The same stores, of which one fails in one method, after so many calls that work."""
    broken: Any = Broken(getattr(stores, store), method, error, after)
    return replace(stores, **{store: broken})


class Broken:
    """One store of a registration; one of its methods fails."""

    def __init__(self, inner: object, method: str, error: BaseException, after: int = 0) -> None:
        self._inner = inner
        self._method = method
        self._error = error
        self._after = after

    def __getattr__(self, name: str) -> Any:
        if name != self._method:
            return getattr(self._inner, name)
        if self._after > 0:
            self._after -= 1
            return getattr(self._inner, name)

        async def fail(*_args: object, **_named: object) -> None:
            raise self._error

        return fail
