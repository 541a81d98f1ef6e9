"""A real embedded Valkey for the whole run, and an empty database for each test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import stamina
from redis.asyncio import Redis

from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.retries import ATTEMPTS

from ...support.disk_tiers import BUDGET_BYTES, OpenTier
from ...support.stores import Stores


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = EmbeddedStore(Path(tmp_path_factory.mktemp("valkey")))
    store.start()
    try:
        yield store.redis_url
    finally:
        store.stop()


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    """A client of its own, to arrange and check around the code under test."""
    client = Redis.from_url(valkey_url, decode_responses=True, protocol=2)
    await client.flushall()
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
async def metadata(valkey_url: str, redis: Redis) -> AsyncIterator[Metadata]:
    connected = await Metadata.connect(valkey_url)
    try:
        yield connected
    finally:
        await connected.close()


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path) -> Stores:
    """A local object store, bound to the empty database."""
    return await Stores.open(tmp_path, metadata)


@pytest.fixture
def retries_do_not_wait() -> Iterator[None]:
    """As many attempts as in earnest, without the pauses between them."""
    with stamina.set_testing(True, attempts=ATTEMPTS, cap=True):
        yield


@pytest.fixture
async def open_tier(tmp_path: Path) -> AsyncIterator[OpenTier]:
    """Opens disk tiers, as processes of their own would, and closes them."""
    opened: list[DiskTier] = []

    def open_tier(
        objects: Objects, budget_bytes: int = BUDGET_BYTES, root: Path = tmp_path / "disk"
    ) -> DiskTier:
        opened.append(DiskTier.open(objects, root, budget_bytes))
        return opened[-1]

    yield open_tier
    for tier in opened:
        await tier.close()
