"""Deletions that died half-way: what is of no use to anybody goes when an operator asks."""

from pathlib import Path

import pytest

from kvkeep_storage.documents import delete_document
from kvkeep_storage.errors import StoreMismatch
from kvkeep_storage.half_deleted import end_deletion, half_deleted
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.quotas import Usage
from kvkeep_storage.records import ContextRecord
from kvkeep_storage.reindex import reindex

from ...support.caches import assert_equal_rows, facts_for, random_rows
from ...support.stores import TENANT, Stores

pytestmark = pytest.mark.anyio

ROWS = random_rows()
FACTS = facts_for(ROWS)


@pytest.fixture
async def stores(metadata: Metadata, tmp_path: Path) -> Stores:
    return await Stores.open(tmp_path, metadata)


async def _found(stores: Stores) -> list[DocumentKey]:
    return await half_deleted(stores.objects, stores.metadata)


@pytest.mark.parametrize("status", ["queued", "failed"])
async def test_a_record_that_a_deletion_left_behind_goes(stores: Stores, status: str) -> None:
    key = await stores.register(FACTS)
    if status == "failed":
        await stores.metadata.fail_context(TENANT, key.context_id, "document_corrupt", "gone")
    await delete_document(stores.objects, key)
    assert await _found(stores) == [key]
    assert await end_deletion(stores.objects, stores.metadata, key)
    assert await _found(stores) == []
    assert await stores.metadata.context(TENANT, key.context_id) is None
    assert await stores.metadata.usage(TENANT) == Usage(0, 0, 0)


async def test_a_context_that_still_answers_is_left_to_its_owner(stores: Stores) -> None:
    key = await stores.register(FACTS)
    await stores.build(ROWS, FACTS)
    await delete_document(stores.objects, key)
    assert await _found(stores) == []
    assert not await end_deletion(stores.objects, stores.metadata, key)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


@pytest.mark.parametrize("lost", ["document.json", "context.json", "nothing"])
async def test_what_a_deletion_did_not_take_is_told_and_not_removed(
    stores: Stores, lost: str
) -> None:
    key = await stores.register(FACTS)
    if lost != "nothing":
        (stores.root / key.body).with_name(lost).unlink()
    assert await _found(stores) == []
    assert not await end_deletion(stores.objects, stores.metadata, key)
    assert await stores.metadata.context(TENANT, key.context_id) is not None


async def test_a_reindex_that_dies_beside_a_deletion_brings_nothing_back_for_good(
    stores: Stores, valkey_url: str
) -> None:
    key = await stores.register(FACTS)

    class Killed(Exception):
        pass

    class Dying(Metadata):
        async def restore_context(self, record: ContextRecord) -> bool:
            # It has seen document and mirror; the deletion runs from its beginning to its end.
            await delete_document(stores.objects, key)
            await stores.metadata.delete_context(TENANT, key.context_id)
            await super().restore_context(record)
            raise Killed

    dying = await Dying.connect(valkey_url)
    with pytest.raises(Killed):
        await reindex(stores.objects, dying)
    await dying.close()
    assert await stores.metadata.context(TENANT, key.context_id) is not None
    assert await _found(stores) == [key]
    assert await end_deletion(stores.objects, stores.metadata, key)
    await reindex(stores.objects, stores.metadata)
    assert await stores.metadata.context(TENANT, key.context_id) is None


async def test_nothing_is_ended_while_the_stores_do_not_belong_together(stores: Stores) -> None:
    key = await stores.register(FACTS)
    await delete_document(stores.objects, key)
    await stores.metadata.bind_store("another")
    with pytest.raises(StoreMismatch):
        await _found(stores)
    with pytest.raises(StoreMismatch):
        await end_deletion(stores.objects, stores.metadata, key)
    assert await stores.metadata.context(TENANT, key.context_id) is not None
