"""A cache proven wrong or gone is rebuilt or failed, everybody is told, and nothing else goes."""

from pathlib import Path

import pytest

from kvkeep_service.errors import ContextFailed, ContextNotFound, ContextNotReady
from kvkeep_service.recovery import Recovery, is_proven
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import get_mirror
from kvkeep_storage.errors import (
    Conflict,
    Corrupt,
    MetadataUnavailable,
    NotFound,
    RecordCorrupt,
)
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import CacheRecord

from ...support.caches import facts_for, random_rows
from ...support.registering import breaking
from ...support.stores import TENANT, files_below
from ...support.stores import Stores as Storage

pytestmark = pytest.mark.anyio

ROWS = random_rows()
FACTS = facts_for(ROWS)
CACHE_ID = FACTS.fingerprint.digest


@pytest.fixture
async def storage(stores: Stores, tmp_path: Path) -> Storage:
    return await Storage.open(tmp_path, stores.metadata)


@pytest.fixture
async def cache(storage: Storage) -> CacheRecord:
    """A committed cache of two contexts."""
    await storage.register(FACTS, "ctx_01")
    await storage.register(FACTS, "ctx_02")
    return await storage.build(ROWS, FACTS)


def corrupt(cache: CacheRecord) -> Corrupt:
    return Corrupt("kv-00", "differs", cache_id=CACHE_ID, generation=cache.generation)


async def status(stores: Stores, context_id: str) -> str:
    record = await stores.metadata.context(TENANT, context_id)
    assert record is not None
    return record.status


async def queued(stores: Stores) -> list[str]:
    """The contexts of all jobs, which are claimed by this."""
    found = []
    while (job := await stores.jobs.claim("test", 0)) is not None:
        found.append(job.context_id)
    return sorted(found)


def test_only_a_named_generation_or_a_missing_record_is_proof() -> None:
    assert is_proven(Corrupt("kv-00", "differs", generation="g"))
    assert is_proven(NotFound("cache", CACHE_ID))
    assert not is_proven(RecordCorrupt("cache", "a field is missing"))


async def test_a_corrupt_cache_goes_and_its_contexts_are_built_again(
    stores: Stores, cache: CacheRecord, tmp_path: Path
) -> None:
    told = await Recovery(stores, rebuilds=True).recover(TENANT, CACHE_ID, "ctx_01", corrupt(cache))
    assert isinstance(told, ContextNotReady)
    assert told.facts["status_of_context"] == "rebuilding"
    assert await stores.metadata.cache(TENANT, CACHE_ID) is None
    assert [await status(stores, name) for name in ("ctx_01", "ctx_02")] == ["rebuilding"] * 2
    assert await queued(stores) == ["ctx_01", "ctx_02"]
    assert files_below(tmp_path, "caches") == []
    assert len(files_below(tmp_path, "documents")) == 4


async def test_where_caches_are_not_rebuilt_the_contexts_fail_for_good(
    stores: Stores, cache: CacheRecord
) -> None:
    told = await Recovery(stores, rebuilds=False).recover(
        TENANT, CACHE_ID, "ctx_01", corrupt(cache)
    )
    assert isinstance(told, ContextFailed)
    assert told.facts["error_code"] == "cache_corrupt"
    assert [await status(stores, name) for name in ("ctx_01", "ctx_02")] == ["failed"] * 2
    assert await queued(stores) == []
    assert await stores.metadata.unfinished() == []
    # A reindex must not bring them back as ready.
    mirror = await get_mirror(stores.objects, DocumentKey(TENANT, "ctx_02"))
    assert mirror.record.status == "failed"


async def test_field_08_every_query_that_found_it_corrupt_is_told_the_same_and_it_goes_once(
    stores: Stores, cache: CacheRecord
) -> None:
    recovery = Recovery(stores, rebuilds=True)
    for _ in range(3):
        told = await recovery.recover(TENANT, CACHE_ID, "ctx_02", corrupt(cache))
        assert isinstance(told, ContextNotReady)
    assert await queued(stores) == ["ctx_01", "ctx_02"]


async def test_a_generation_that_was_replaced_meanwhile_is_left_alone(
    stores: Stores, storage: Storage, cache: CacheRecord
) -> None:
    error = corrupt(cache)
    newer = await storage.build(ROWS, FACTS)
    await Recovery(stores, rebuilds=True).recover(TENANT, CACHE_ID, "ctx_01", error)
    found = await stores.metadata.cache(TENANT, CACHE_ID)
    assert found is not None
    assert found.generation == newer.generation
    assert await status(stores, "ctx_01") == "ready"
    assert await queued(stores) == []
    assert len((await storage.load(FACTS)).rows.layers) == 2


async def test_field_28_a_ready_context_without_a_cache_record_is_built_again(
    stores: Stores, storage: Storage
) -> None:
    await storage.register(FACTS, "ctx_01", status="ready")
    told = await Recovery(stores, rebuilds=True).recover(
        TENANT, CACHE_ID, "ctx_01", NotFound("cache", CACHE_ID)
    )
    assert isinstance(told, ContextNotReady)
    assert await status(stores, "ctx_01") == "rebuilding"
    assert await queued(stores) == ["ctx_01"]
    # The next one to find it missing adds no second job.
    await Recovery(stores, rebuilds=True).recover(
        TENANT, CACHE_ID, "ctx_01", NotFound("cache", CACHE_ID)
    )
    assert await queued(stores) == []


async def test_a_context_deleted_meanwhile_is_not_brought_back(
    stores: Stores, cache: CacheRecord
) -> None:
    for name in ("ctx_01", "ctx_02"):
        await stores.metadata.delete_context(TENANT, name)
    recovery = Recovery(stores, rebuilds=True)
    for error in (corrupt(cache), NotFound("cache", CACHE_ID)):
        told = await recovery.recover(TENANT, CACHE_ID, "ctx_01", error)
        assert isinstance(told, ContextNotFound)
    assert await queued(stores) == []
    assert await stores.metadata.context(TENANT, "ctx_01") is None


@pytest.mark.parametrize(
    "change", [NotFound("context", "ctx_01"), Conflict("context", "ctx_01", "it is failed")]
)
async def test_a_context_that_changes_in_the_very_moment_is_left_to_who_changed_it(
    stores: Stores, storage: Storage, change: NotFound | Conflict
) -> None:
    await storage.register(FACTS, "ctx_01", status="ready")
    changing = breaking(stores, "metadata", "set_building", change)
    told = await Recovery(changing, rebuilds=True).recover(
        TENANT, CACHE_ID, "ctx_01", NotFound("cache", CACHE_ID)
    )
    assert isinstance(told, ContextNotReady)
    assert await queued(stores) == []


async def test_what_an_outage_keeps_from_the_queue_is_found_by_reconciling(
    stores: Stores, cache: CacheRecord
) -> None:
    broken = breaking(stores, "jobs", "enqueue", MetadataUnavailable("redis", "away"), after=1)
    with pytest.raises(MetadataUnavailable):
        await Recovery(broken, rebuilds=True).recover(TENANT, CACHE_ID, "ctx_01", corrupt(cache))
    assert await stores.jobs.reconcile(stores.metadata) == 1
    assert await queued(stores) == ["ctx_01", "ctx_02"]
