import asyncio
import time

import pytest
from redis.asyncio import Redis

from kvkeep_storage.errors import (
    Conflict,
    Gone,
    Invalid,
    NotFound,
)
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import Expiry, Released
from kvkeep_storage.redis_keys import TenantKeys

from .samples import CACHE, TENANT, a_cache, a_context, every_key, stored

pytestmark = pytest.mark.anyio
NOW = 1_790_000_500.75
KEYS = TenantKeys(TENANT)


async def test_a_context_is_stored_with_every_index_it_needs(
    metadata: Metadata, redis: Redis
) -> None:
    record = a_context(
        name="report é \ud800",
        metadata={"team": "ü"},
        expires_at=4e9,
        expires_anchor="created_at",
        expires_seconds=60,
    )
    await metadata.create_context(record)
    assert await metadata.context(TENANT, record.id) == record
    assert await redis.zrange(KEYS.contexts, 0, -1) == [record.id]
    assert await redis.smembers(KEYS.unfinished) == {record.id}
    assert await redis.zscore(KEYS.expiry, record.id) == 4e9
    assert await redis.smembers(KEYS.references(CACHE)) == {record.id}
    assert await metadata.unfinished() == [(TENANT, record.id)]
    assert await metadata.tenants() == [TENANT]


async def test_an_id_is_given_once_and_the_first_context_stays(metadata: Metadata) -> None:
    await metadata.create_context(a_context(name="first"))
    with pytest.raises(Conflict, match="ctx_01"):
        await metadata.create_context(a_context(name="second"))
    assert (await stored(metadata, "ctx_01")).name == "first"
    assert not await metadata.restore_context(a_context(name="third"))


@pytest.mark.parametrize("context_id", ["", "no such", "a:b", "{x}", "ü" * 300])
async def test_an_id_that_never_was_is_simply_not_there(
    metadata: Metadata, context_id: str
) -> None:
    assert await metadata.context(TENANT, context_id) is None
    assert not (await metadata.delete_context(TENANT, context_id)).existed
    assert not await metadata.touch_context(TENANT, context_id, NOW)
    assert not await metadata.progress(TENANT, context_id, "prefill", 0.5)
    assert not await metadata.fail_context(TENANT, context_id, "code", "detail")
    assert await metadata.attach(TENANT, context_id, NOW) is None
    with pytest.raises(NotFound):
        await metadata.patch_context(TENANT, context_id, name="x")
    with pytest.raises(NotFound):
        await metadata.set_building(TENANT, context_id, rebuilding=False)


async def test_an_expired_context_can_neither_be_patched_nor_used_back_to_life(
    metadata: Metadata,
) -> None:
    await metadata.create_context(
        a_context(expires_at=time.time() - 1, expires_anchor="last_used_at", expires_seconds=60)
    )
    with pytest.raises(Gone):
        await metadata.patch_context(TENANT, "ctx_01", expires=None)
    assert not await metadata.touch_context(TENANT, "ctx_01", time.time())
    record = await stored(metadata, "ctx_01")
    assert (record.status, record.queries) == ("expired", 0)


async def test_an_expiry_anchored_at_the_last_use_slides_and_the_other_stays(
    metadata: Metadata, redis: Redis
) -> None:
    for context_id, anchor in (("ctx_used", "last_used_at"), ("ctx_made", "created_at")):
        await metadata.create_context(
            a_context(context_id, expires_at=NOW + 60, expires_anchor=anchor, expires_seconds=3600)
        )
        assert await metadata.touch_context(TENANT, context_id, NOW + 50.123456)
    used, made = await stored(metadata, "ctx_used"), await stored(metadata, "ctx_made")
    assert used.last_used_at == made.last_used_at == NOW + 50.123456
    assert used.queries == made.queries == 1
    assert used.expires_at == NOW + 50.123456 + 3600
    assert made.expires_at == NOW + 60
    assert await redis.zscore(KEYS.expiry, "ctx_used") == used.expires_at
    assert await metadata.expired(NOW + 60, 10) == [(TENANT, "ctx_made")]


async def test_a_late_touch_never_moves_the_last_use_back(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    await metadata.touch_context(TENANT, "ctx_01", NOW + 5)
    await metadata.touch_context(TENANT, "ctx_01", NOW)
    record = await stored(metadata, "ctx_01")
    assert (record.last_used_at, record.queries) == (NOW + 5, 2)


async def test_a_patch_changes_what_it_names_and_nothing_else(metadata: Metadata) -> None:
    before = a_context(name="old", metadata={"a": "1"}, expires_at=4e9)
    await metadata.create_context(before)
    after = await metadata.patch_context(TENANT, before.id, metadata={"b": "2"})
    assert (after.name, after.metadata, after.expires_at) == ("old", {"b": "2"}, 4e9)
    after = await metadata.patch_context(TENANT, before.id, name=None)
    assert (after.name, after.metadata) == (None, {"b": "2"})
    after = await metadata.patch_context(TENANT, before.id, name="", metadata={})
    assert (after.name, after.metadata) == ("", {})
    assert after == await stored(metadata, before.id)


async def test_a_patched_expiry_counts_from_its_anchor_and_none_means_never(
    metadata: Metadata, redis: Redis
) -> None:
    record = a_context(created_at=time.time() - 0.25)
    await metadata.create_context(record)
    after = await metadata.patch_context(TENANT, record.id, expires=Expiry("last_used_at", 3600))
    assert after.expires_at == pytest.approx(record.created_at + 3600, abs=1e-6)
    used_at = time.time()
    await metadata.touch_context(TENANT, record.id, used_at)
    after = await metadata.patch_context(TENANT, record.id, expires=Expiry("created_at", 60))
    assert (after.expires_anchor, after.expires_seconds) == ("created_at", 60)
    assert after.expires_at == record.created_at + 60
    assert await redis.zscore(KEYS.expiry, record.id) == after.expires_at
    after = await metadata.patch_context(TENANT, record.id, expires=None)
    assert (after.expires_at, after.expires_anchor, after.expires_seconds) == (None, None, None)
    assert await redis.zscore(KEYS.expiry, record.id) is None


async def test_a_patched_expiry_in_the_past_answers_expired(metadata: Metadata) -> None:
    await metadata.create_context(a_context(created_at=time.time() - 1000))
    after = await metadata.patch_context(TENANT, "ctx_01", expires=Expiry("created_at", 10))
    assert after.status == "expired"


async def test_progress_is_written_only_while_a_build_runs(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    assert not await metadata.progress(TENANT, "ctx_01", "prefill", 0.5)
    await metadata.set_building(TENANT, "ctx_01", rebuilding=False)
    assert await metadata.progress(TENANT, "ctx_01", "prefill", 0.5)
    record = await stored(metadata, "ctx_01")
    assert (record.status, record.stage, record.fraction) == ("building", "prefill", 0.5)
    # The next attempt starts from the beginning.
    await metadata.set_building(TENANT, "ctx_01", rebuilding=False)
    record = await stored(metadata, "ctx_01")
    assert (record.status, record.stage, record.fraction) == ("building", None, 0.0)
    with pytest.raises(Invalid, match="fraction"):
        await metadata.progress(TENANT, "ctx_01", "prefill", 1.5)


async def test_a_failure_is_final_kept_and_seen(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    await metadata.set_building(TENANT, "ctx_01", rebuilding=False)
    assert await metadata.fail_context(TENANT, "ctx_01", "out_of_memory", "x" * 5000)
    record = await stored(metadata, "ctx_01")
    assert (record.status, record.error_code) == ("failed", "out_of_memory")
    assert record.error_detail == "x" * 2000
    assert await metadata.unfinished() == []
    assert not await metadata.fail_context(TENANT, "ctx_01", "other", "again")
    assert (await stored(metadata, "ctx_01")).error_code == "out_of_memory"
    with pytest.raises(Conflict, match="failed"):
        await metadata.set_building(TENANT, "ctx_01", rebuilding=False)


async def test_a_ready_context_cannot_fail_nor_be_built_but_can_be_rebuilt(
    metadata: Metadata,
) -> None:
    await metadata.create_context(a_context(status="ready"))
    assert await metadata.unfinished() == []
    assert not await metadata.fail_context(TENANT, "ctx_01", "code", "detail")
    with pytest.raises(Conflict, match="ready"):
        await metadata.set_building(TENANT, "ctx_01", rebuilding=False)
    await metadata.set_building(TENANT, "ctx_01", rebuilding=True)
    assert (await stored(metadata, "ctx_01")).status == "rebuilding"
    assert await metadata.unfinished() == [(TENANT, "ctx_01")]


async def test_deleting_the_last_context_leaves_no_key_and_names_the_generation(
    metadata: Metadata, redis: Redis
) -> None:
    for context_id in ("ctx_01", "ctx_02"):
        await metadata.create_context(a_context(context_id, expires_at=4e9))
    await metadata.restore_cache(a_cache())
    assert await metadata.delete_context(TENANT, "ctx_01") == Released(None, None)
    assert await metadata.context(TENANT, "ctx_01") is None
    assert await metadata.cache(TENANT, CACHE) is not None
    assert await metadata.delete_context(TENANT, "ctx_02") == Released(CACHE, "gen1")
    assert await every_key(redis) == set()
    assert await metadata.live_generations(TENANT) == set()
    assert await metadata.delete_context(TENANT, "ctx_02") == Released(None, None, existed=False)


async def test_deleting_before_the_build_is_committed_names_no_generation(
    metadata: Metadata,
) -> None:
    await metadata.create_context(a_context())
    assert await metadata.delete_context(TENANT, "ctx_01") == Released(CACHE, None)


async def test_many_deletes_at_once_release_the_cache_exactly_once(metadata: Metadata) -> None:
    ids = [f"ctx_{number}" for number in range(20)]
    for context_id in ids:
        await metadata.create_context(a_context(context_id))
    await metadata.restore_cache(a_cache())
    outcomes = await asyncio.gather(
        *(metadata.delete_context(TENANT, context_id) for context_id in ids * 2)
    )
    assert sum(outcome.generation == "gen1" for outcome in outcomes) == 1
    assert sum(outcome.existed for outcome in outcomes) == 20


async def test_an_index_entry_without_a_record_goes_with_a_delete(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.create_context(a_context(expires_at=NOW))
    await redis.delete(KEYS.context("ctx_01"))
    assert await metadata.expired(NOW, 10) == [(TENANT, "ctx_01")]
    assert (await metadata.contexts(TENANT, limit=10)).records == ()
    await metadata.delete_context(TENANT, "ctx_01")
    assert await metadata.expired(NOW, 10) == []
    assert await metadata.unfinished() == []


@pytest.mark.parametrize(("ratio", "attaches"), [(0.1, True), (0.3, True), (0.31, False)])
async def test_a_context_attaches_to_a_committed_cache_up_to_its_ratio(
    metadata: Metadata, ratio: float, attaches: bool
) -> None:
    await metadata.restore_cache(a_cache())
    await metadata.create_context(a_context(ratio=ratio))
    attached = await metadata.attach(TENANT, "ctx_01", NOW)
    record = await stored(metadata, "ctx_01")
    if not attaches:
        assert attached is None
        assert record == a_context(ratio=ratio)
        assert await metadata.unfinished() == [(TENANT, "ctx_01")]
        return
    assert attached == record
    assert (record.status, record.ready_at, record.stored_bytes) == ("ready", NOW, 300_123)
    assert record.ratios_available == tuple(item for item in a_cache().ratios if item <= ratio)
    assert await metadata.unfinished() == []


@pytest.mark.parametrize("status", ["ready", "failed"])
async def test_only_a_waiting_context_attaches(metadata: Metadata, status: str) -> None:
    await metadata.restore_cache(a_cache())
    await metadata.create_context(a_context(status=status))
    assert await metadata.attach(TENANT, "ctx_01", NOW) is None
    assert (await stored(metadata, "ctx_01")).status == status


async def test_nothing_attaches_to_a_cache_that_is_not_committed(metadata: Metadata) -> None:
    await metadata.restore_cache(a_cache(cache_id="d" * 64))
    await metadata.create_context(a_context())
    assert await metadata.attach(TENANT, "ctx_01", NOW) is None
