"""Real stores and a registry over them, new for each test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(tmp_path_factory.mktemp("data"))
    store.start()
    yield store
    store.stop()


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
