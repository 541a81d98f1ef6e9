"""Leftovers among the documents: only what nothing can bring back goes, and only when asked."""

import os
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage.accounts import accounts
from kvkeep_storage.documents import put_document
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.lone_documents import delete_lone_document, lone_documents
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.quotas import Usage
from kvkeep_storage.sweeper import Sweeper

from ...support.caches import facts_for, random_rows
from ...support.stores import TENANT, Stores, a_document, entries_below, files_below

pytestmark = pytest.mark.anyio

ROWS = random_rows()
FACTS = facts_for(ROWS)
LONE = DocumentKey(TENANT, "ctx_lone")


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path) -> Stores:
    return await Stores.open(tmp_path, metadata)


def _age(stores: Stores) -> None:
    for name in files_below(stores.root):
        os.utime(stores.root / name, (1, 1))


async def _found(stores: Stores) -> list[DocumentKey]:
    found = await lone_documents(stores.objects, stores.metadata, grace_seconds=3600)
    return [item.key for item in found]


async def test_field_23_a_document_whose_registration_crashed_is_found_after_the_grace(
    stores: Stores,
) -> None:
    await stores.register(FACTS)
    await put_document(stores.objects, LONE, a_document())
    assert await _found(stores) == []
    _age(stores)
    assert await _found(stores) == [LONE]
    # The sweeper leaves documents alone, however old.
    await Sweeper(stores.objects, stores.metadata, stores.leases, 3600).run_once()
    assert await _found(stores) == [LONE]
    assert await delete_lone_document(stores.objects, stores.metadata, LONE)
    assert await _found(stores) == []
    assert not any(LONE.context_id in name for name in entries_below(stores.root))
    assert await stores.metadata.context(TENANT, "ctx_01") is not None


async def test_a_mirror_whose_deletion_crashed_is_found(stores: Stores) -> None:
    key = await stores.register(FACTS)
    await stores.objects.delete(key.body)
    await stores.metadata.delete_context(TENANT, "ctx_01")
    _age(stores)
    assert await _found(stores) == [key]


async def test_what_a_reindex_would_bring_back_is_no_leftover(stores: Stores, redis: Redis) -> None:
    await stores.register(FACTS)
    (key,) = [key async for key in redis.scan_iter("*context:ctx_01")]
    await redis.delete(key)
    _age(stores)
    assert await _found(stores) == []


async def test_a_document_that_has_a_record_by_now_is_kept(stores: Stores) -> None:
    key = await stores.register(FACTS)
    assert not await delete_lone_document(stores.objects, stores.metadata, key)
    assert (stores.root / key.body).exists()


async def test_after_a_flush_no_document_is_taken_for_a_leftover(
    stores: Stores, redis: Redis
) -> None:
    await put_document(stores.objects, LONE, a_document())
    _age(stores)
    await redis.flushall()
    with pytest.raises(StoreMismatch):
        await _found(stores)
    with pytest.raises(StoreMismatch):
        await delete_lone_document(stores.objects, stores.metadata, LONE)
    assert (stores.root / LONE.body).exists()


async def test_accounts_add_up_what_lies_there_and_what_is_charged(stores: Stores) -> None:
    await stores.register(FACTS)
    cache = await stores.build(ROWS, FACTS)
    await put_document(stores.objects, DocumentKey("other", "ctx_lone"), a_document())
    mine, other = await accounts(stores.objects, stores.metadata)
    assert mine.tenant == TENANT
    assert mine.usage == Usage(1, 0, cache.stored_bytes)
    assert mine.cache_bytes == cache.stored_bytes
    sizes = [(stores.root / name).stat().st_size for name in files_below(stores.root, "documents")]
    assert mine.document_bytes + other.document_bytes == sum(sizes)
    assert (other.tenant, other.usage, other.cache_bytes) == ("other", Usage(0, 0, 0), 0)
