"""A reindex may run beside a living service: no record may name what is being deleted."""

import pytest

from kvkeep_storage.documents import delete_document
from kvkeep_storage.errors import NotFound
from kvkeep_storage.generations import release_generation
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.reindex import reindex
from kvkeep_storage.sweeper import Sweeper

from ..support.caches import assert_equal_rows, facts_for, random_rows
from ..support.stores import TENANT, Stores, files_below

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

ROWS = random_rows()
FACTS = facts_for(ROWS)
CACHE_ID = FACTS.fingerprint.digest


async def _delete(stores: Stores, key: DocumentKey) -> None:
    """What DELETE does, to its end."""
    await delete_document(stores.objects, key)
    released = await stores.metadata.delete_context(key.tenant, key.context_id)
    if released.cache_id and released.generation:
        generation = GenerationKey(key.tenant, released.cache_id, released.generation)
        await release_generation(stores.objects, stores.metadata, stores.leases, generation)


async def _register_again_and_load(stores: Stores) -> None:
    """The same content, registered anew: never ready without its bytes."""
    await stores.register(FACTS, "ctx_02")
    if await stores.metadata.attach(TENANT, "ctx_02", 1.0) is None:
        with pytest.raises(NotFound):
            await stores.load(FACTS)
        await stores.build(ROWS, FACTS)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


async def test_a_cache_deleted_during_a_reindex_is_not_named_again(
    stores: Stores, valkey_url: str
) -> None:
    key = await stores.register(FACTS)
    await stores.build(ROWS, FACTS)

    class DeletedOnTheWay(Metadata):
        async def restore_cache(self, cache: CacheRecord) -> bool:
            # The generation has been found whole.
            await _delete(stores, key)
            return await super().restore_cache(cache)

    metadata = await DeletedOnTheWay.connect(valkey_url)
    await reindex(stores.objects, metadata)
    await metadata.close()
    assert await stores.metadata.context(TENANT, key.context_id) is None
    assert await stores.metadata.cache(TENANT, CACHE_ID) is None
    await _register_again_and_load(stores)


async def test_a_cache_that_is_being_deleted_is_not_restored(stores: Stores) -> None:
    key = await stores.register(FACTS)
    cache = await stores.build(ROWS, FACTS)
    manifest = GenerationKey(TENANT, CACHE_ID, cache.generation).manifest

    class ReindexedOnTheWay(Objects):
        async def delete(self, name: str) -> None:
            # The record is gone, the first of its files is about to be.
            if name == manifest and await stores.metadata.context(TENANT, "ctx_03") is None:
                await stores.register(FACTS, "ctx_03")
                await reindex(stores.objects, stores.metadata)
            await super().delete(name)

    deleting = Stores(
        ReindexedOnTheWay.open(f"file://{stores.root}"),
        stores.metadata,
        stores.leases,
        stores.root,
    )
    await _delete(deleting, key)
    assert files_below(stores.root, "caches") == []
    record = await stores.metadata.context(TENANT, "ctx_03")
    assert record is not None
    assert record.status == "queued"
    await _register_again_and_load(stores)


async def test_a_generation_restored_during_a_sweep_is_kept_or_rebuilt(stores: Stores) -> None:
    await stores.register(FACTS)
    cache = await stores.build(ROWS, FACTS)
    # As if its record had been lost.
    await stores.metadata.quarantine(TENANT, CACHE_ID, cache.generation)

    class ReindexedOnTheWay(Objects):
        async def delete(self, name: str) -> None:
            if name.startswith("caches/") and name.endswith("manifest.json"):
                await reindex(stores.objects, stores.metadata)
            await super().delete(name)

    objects = ReindexedOnTheWay.open(f"file://{stores.root}")
    report = await Sweeper(objects, stores.metadata, stores.leases, 0).run_once()
    assert report.orphan_generations == 1
    assert await stores.metadata.cache(TENANT, CACHE_ID) is None
    await _register_again_and_load(stores)


async def test_a_generation_that_a_reindex_restored_is_not_released(
    stores: Stores,
) -> None:
    await stores.register(FACTS)
    cache = await stores.build(ROWS, FACTS)
    key = GenerationKey(TENANT, CACHE_ID, cache.generation)
    assert await release_generation(stores.objects, stores.metadata, stores.leases, key)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
