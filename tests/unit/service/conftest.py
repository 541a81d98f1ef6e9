"""Real stores and a registry over them, new for each test."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvkeep_service.registry import Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects

from ...support.scripted_worker import ScriptedWorker

if TYPE_CHECKING:
    from kvkeep_service.engine.model import LoadedModel

    from .workbench import Workbench


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(tmp_path_factory.mktemp("data"))
    store.start()
    yield store
    store.stop()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    # Where cores are shared, threads that wait for each other make a tiny model many times slower.
    # Tests of the HTTP side do without torch.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "LoadedModel":
    """A tiny random model with a real tokenizer; only tests that ask for it import torch."""
    from .tiny import load_tiny

    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stores(embedded: EmbeddedStore, tmp_path: Path) -> AsyncIterator[Stores]:
    metadata = await Metadata.connect(embedded.redis_url)
    await metadata.link.command("FLUSHALL")
    objects = Objects.open(tmp_path.as_uri())
    await bind_if_new(objects, metadata)
    yield Stores(metadata, objects, Leases(metadata), Jobs(metadata))
    await metadata.close()


@pytest.fixture
async def worker(stores: Stores) -> ScriptedWorker:
    return ScriptedWorker(stores)


@pytest.fixture
async def registry(stores: Stores, worker: ScriptedWorker) -> AsyncIterator[Registry]:
    registry = Registry(stores, worker)
    yield registry
    await registry.close()


@pytest.fixture
async def bench(
    stores: Stores, tiny: "LoadedModel", monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator["Workbench"]:
    """A builder that is not started; nothing it does waits for a clock."""
    from .workbench import workbench

    monkeypatch.setattr("kvkeep_service.heartbeat._PROGRESS_SECONDS", 0.001)
    monkeypatch.setattr("kvkeep_service.builder._RETRY_SECONDS", 0)
    async with workbench(stores, tiny) as opened:
        yield opened
