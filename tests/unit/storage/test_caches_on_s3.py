"""A cache's life on each S3 server: committed, loaded, restored after a flush, deleted."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage import keys
from kvkeep_storage.errors import Corrupt
from kvkeep_storage.generations import delete_generation
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.reindex import reindex

from ...support.caches import RATIOS, assert_equal_rows, facts_for, prefix_of, random_rows
from ...support.stores import Stores

pytestmark = [pytest.mark.anyio, pytest.mark.s3]

ROWS = random_rows()
FACTS = facts_for(ROWS)


@pytest.fixture
async def stores(s3_url: str, metadata: Metadata, tmp_path: Path) -> Stores:
    opened = await Stores.open(tmp_path, metadata)
    opened.objects = Objects.open(s3_url)
    await metadata.bind_store(await opened.objects.store_id())
    await opened.register(FACTS)
    return opened


async def test_what_was_committed_is_loaded_at_every_ratio(stores: Stores) -> None:
    await stores.build(ROWS, FACTS)
    for bands, ratio in enumerate(RATIOS, start=1):
        loaded = await stores.load(FACTS, ratio)
        assert_equal_rows(loaded.rows, prefix_of(ROWS, bands))


async def test_what_a_flush_of_redis_took_comes_back_from_the_bucket(
    stores: Stores, redis: Redis
) -> None:
    cache = await stores.build(ROWS, FACTS)
    await redis.flushall()
    report = await reindex(stores.objects, stores.metadata)
    assert (report.contexts, report.caches, report.damaged) == (1, 1, ())
    loaded = await stores.load(FACTS)
    assert loaded.cache.generation == cache.generation
    assert_equal_rows(loaded.rows, ROWS)


async def test_bytes_that_are_wrong_or_missing_in_the_bucket_are_never_rows(
    stores: Stores,
) -> None:
    cache = await stores.build(ROWS, FACTS)
    slab = GenerationKey(cache.tenant, cache.cache_id, cache.generation).slab(1)
    content = await stores.objects.get(slab)
    for damaged in (content[:-1], content + b"0", bytes([content[0] ^ 1]) + content[1:], b""):
        await stores.objects.put(slab, damaged)
        with pytest.raises(Corrupt):
            await stores.load(FACTS)
    await stores.objects.delete(slab)
    with pytest.raises(Corrupt):
        await stores.load(FACTS)
    await stores.objects.put(slab, content)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_a_deleted_generation_leaves_nothing_in_the_bucket(stores: Stores) -> None:
    cache = await stores.build(ROWS, FACTS)
    key = GenerationKey(cache.tenant, cache.cache_id, cache.generation)
    assert len(await delete_generation(stores.objects, key)) == len(RATIOS) + 1
    assert await stores.objects.objects_below(keys.CACHES) == []
