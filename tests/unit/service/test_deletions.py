"""A deletion that was acknowledged stays one, also when Redis forgets it in a failover."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep_service.deletions import REMEMBERED_SECONDS, Deletions
from kvkeep_service.errors import ContextNotFound
from kvkeep_service.ports import DocumentSpec
from kvkeep_service.registry import Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import MetadataUnavailable
from kvkeep_storage.records import ContextRecord

from ...support.registering import AWAY, WANTED, Broken, built, stored
from ...support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.anyio


async def deleted_and_back(stores: Stores, registry: Registry, context_id: str) -> None:
    """Delete a context, and let Redis be as it was before."""
    record = await registry.context("default", context_id)
    cache = await stores.metadata.cache("default", record.cache_id)
    await registry.delete("default", context_id)
    assert await stores.metadata.restore_context(record)
    if cache is not None:
        assert await stores.metadata.restore_cache(cache)


async def test_a_deletion_that_a_failover_undid_is_made_again(
    registry: Registry, stores: Stores, worker: ScriptedWorker, tmp_path: Path
) -> None:
    kept = await built(registry, worker)
    other = replace(WANTED, document=DocumentSpec("This agreement ends on 1 April 2030."))
    gone = await built(registry, worker, other)
    await deleted_and_back(stores, registry, gone)
    assert (await registry.context("default", gone)).status == "ready"
    await registry.repeat_deletions()
    with pytest.raises(ContextNotFound):
        await registry.context("default", gone)
    assert (await registry.context("default", kept)).status == "ready"
    assert not any(gone in name for name in stored(tmp_path))


async def test_a_record_that_waits_for_a_build_again_is_taken_from_the_queue(
    registry: Registry, stores: Stores
) -> None:
    record = await _registered(registry, stores)
    await deleted_and_back(stores, registry, record.id)
    assert await stores.metadata.unfinished() == [("default", record.id)]
    await registry.repeat_deletions()
    assert await stores.metadata.unfinished() == []


async def test_while_redis_is_away_the_deletion_is_not_forgotten(
    registry: Registry, stores: Stores
) -> None:
    record = await _registered(registry, stores)
    deletions = Deletions()
    deletions.add("default", record.id)

    class Away:
        link = Broken(stores.metadata.link, "run", AWAY)

    with pytest.raises(MetadataUnavailable):
        await deletions.undone(Away())  # type: ignore[arg-type]  # only its link is used
    assert await deletions.undone(stores.metadata) == [("default", record.id)]


async def test_deletions_are_remembered_for_their_time_and_the_last_of_very_many(
    registry: Registry, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await _registered(registry, stores), await _registered(registry, stores)
    now = 0.0
    deletions = Deletions(lambda: now)
    deletions.add("default", first.id)
    now = REMEMBERED_SECONDS - 1
    deletions.add("default", second.id)
    assert len(await deletions.undone(stores.metadata)) == 2
    now = REMEMBERED_SECONDS + 1
    assert await deletions.undone(stores.metadata) == [("default", second.id)]
    monkeypatch.setattr("kvkeep_service.deletions._REMEMBERED_MAX", 1)
    deletions.add("default", first.id)
    assert await deletions.undone(stores.metadata) == [("default", first.id)]


async def _registered(registry: Registry, stores: Stores) -> ContextRecord:
    record = await registry.register("default", WANTED)
    assert await stores.metadata.context("default", record.id) is not None
    return record
