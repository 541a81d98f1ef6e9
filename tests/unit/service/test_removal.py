"""Deleting over real stores, beside others and after a failure."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep_service.errors import (
    ContextNotFound,
)
from kvkeep_service.registry import Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import mirror_context
from kvkeep_storage.errors import MetadataUnavailable
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import Released

from ...support.registering import AWAY, WANTED, breaking, built, stored
from ...support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.anyio


async def test_a_delete_that_broke_off_can_be_repeated(
    stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    context_id = await built(Registry(stores, worker), worker)
    registry = Registry(breaking(stores, "metadata", "delete_context", AWAY), worker)
    with pytest.raises(MetadataUnavailable):
        await registry.delete("default", context_id)
    registry = Registry(stores, worker)
    with pytest.raises(ContextNotFound):
        await registry.document("default", context_id)
    await registry.delete("default", context_id)
    await registry.close()
    assert stored(tmp_path) == ["store.json"]


async def test_a_mirror_written_during_a_delete_goes_too(
    stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    context_id = await built(Registry(stores, worker), worker)

    class Late(Metadata):
        """A worker mirrors the record between the document's end and the record's."""

        async def delete_context(self, tenant: str, context_id: str) -> Released:
            key = DocumentKey(tenant, context_id)
            await mirror_context(stores.objects, stores.metadata, key)
            return await super().delete_context(tenant, context_id)

    registry = Registry(replace(stores, metadata=Late(stores.metadata.link, time.time)), worker)
    await registry.delete("default", context_id)
    await registry.close()
    assert stored(tmp_path) == ["store.json"]


async def test_deleting_while_a_build_waits_leaves_no_reference(
    registry: Registry, stores: Stores, tmp_path: Path
) -> None:
    record = await registry.register("default", WANTED)
    await registry.delete("default", record.id)
    assert await stores.metadata.unfinished() == []
    assert await stores.metadata.live_generations("default") == set()
    assert stored(tmp_path) == ["store.json"]
