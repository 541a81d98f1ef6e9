"""A real Valkey for the whole run, emptied before each test, and stores beside it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.metadata import Metadata

from ..support.stores import Stores


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = EmbeddedStore(Path(tmp_path_factory.mktemp("valkey")))
    store.start()
    try:
        yield store.redis_url
    finally:
        store.stop()


@pytest.fixture
async def stores(valkey_url: str, tmp_path: Path) -> AsyncIterator[Stores]:
    client = Redis.from_url(valkey_url, protocol=2)
    await client.flushall()
    await client.aclose()
    metadata = await Metadata.connect(valkey_url)
    try:
        yield await Stores.open(tmp_path / "objects", metadata)
    finally:
        await metadata.close()
