import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import (
    Conflict,
    Gone,
    Invalid,
    LeaseLost,
    MetadataUnavailable,
    NotFound,
    RecordCorrupt,
    Unreferenced,
)
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import BuildLease, Expiry, Released
from kvkeep_storage.redis_keys import TenantKeys

from .samples import CACHE, TENANT, a_cache, a_context, a_lease_nobody_gave, stored

pytestmark = pytest.mark.anyio
NOW = 1_790_000_500.75
KEYS = TenantKeys(TENANT)


async def lease_on(metadata: Metadata, cache_id: str = CACHE, owner: str = "w1") -> BuildLease:
    lease = await Leases(metadata).acquire_build(TENANT, cache_id, owner)
    assert lease is not None
    return lease


async def process_id(url: str) -> int:
    async with Redis.from_url(url) as client:
        return int((await client.info("server"))["process_id"])


async def every_key(redis: Redis) -> set[str]:
    return {key for key in await redis.keys("*") if not key.startswith("{kvkeep}")}


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


async def test_a_tenant_does_not_see_anothers_context(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    assert await metadata.context("other", "ctx_01") is None
    assert (await metadata.contexts("other", limit=10)).records == ()
    assert not (await metadata.delete_context("other", "ctx_01")).existed
    assert (await stored(metadata, "ctx_01")).id == "ctx_01"


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


async def test_a_damaged_record_is_an_error_and_not_half_a_context(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.create_context(a_context())
    await redis.hdel(KEYS.context("ctx_01"), "ratio")
    with pytest.raises(RecordCorrupt, match="ratio"):
        await metadata.context(TENANT, "ctx_01")


async def test_a_context_reads_as_expired_before_anything_sweeps_it(metadata: Metadata) -> None:
    await metadata.create_context(a_context("ctx_01", expires_at=time.time() - 1))
    await metadata.create_context(a_context("ctx_02", expires_at=time.time() + 1000))
    assert (await stored(metadata, "ctx_01")).status == "expired"
    assert (await stored(metadata, "ctx_02")).status == "queued"
    page = await metadata.contexts(TENANT, limit=10, status="expired")
    assert [record.id for record in page.records] == ["ctx_01"]


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


async def test_the_sweeper_is_told_what_expired_up_to_its_limit(metadata: Metadata) -> None:
    for tenant in ("a", "b"):
        for number in range(3):
            await metadata.create_context(
                a_context(f"ctx_{number}", tenant=tenant, expires_at=NOW + number)
            )
    assert await metadata.expired(NOW - 1, 10) == []
    assert await metadata.expired(NOW, 10) == [("a", "ctx_0"), ("b", "ctx_0")]
    assert await metadata.expired(NOW + 9, 4) == [
        ("a", "ctx_0"),
        ("a", "ctx_1"),
        ("a", "ctx_2"),
        ("b", "ctx_0"),
    ]
    assert await metadata.expired(NOW + 9, 0) == []


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


async def test_a_flip_makes_every_waiting_context_ready_at_once(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.create_context(a_context("ctx_queued", ratio=0.1))
    await metadata.create_context(a_context("ctx_building", ratio=0.3))
    await metadata.create_context(a_context("ctx_between", ratio=0.123456789012345678))
    await metadata.create_context(a_context("ctx_failed", status="failed"))
    await metadata.create_context(a_context("ctx_more", ratio=0.5))
    await metadata.create_context(a_context("ctx_other", cache_id="d" * 64))
    await metadata.set_building(TENANT, "ctx_building", rebuilding=False)
    await metadata.progress(TENANT, "ctx_building", "scoring", 0.75)

    ready = await metadata.flip(a_cache(), lease=await lease_on(metadata), now=NOW)

    assert sorted(ready) == ["ctx_between", "ctx_building", "ctx_queued"]
    assert await metadata.cache(TENANT, CACHE) == a_cache()
    built = await stored(metadata, "ctx_building")
    assert (built.status, built.stage, built.fraction) == ("ready", None, 1.0)
    assert (built.ready_at, built.ratio_achieved) == (NOW, 0.3001)
    assert (built.stored_bytes, built.timings) == (300_123, a_cache().timings)
    assert built.ratios_available == (0.05, 0.1, 0.15, 0.2, 0.3)
    assert (await stored(metadata, "ctx_queued")).ratios_available == (0.05, 0.1)
    between = await stored(metadata, "ctx_between")
    assert between.ratios_available == (0.05, 0.1, 0.123456789012345678)
    assert (await stored(metadata, "ctx_failed")).status == "failed"
    assert (await stored(metadata, "ctx_more")).status == "queued"
    assert (await stored(metadata, "ctx_other")).status == "queued"
    assert await redis.smembers(KEYS.unfinished) == {"ctx_more", "ctx_other"}
    assert await metadata.live_generations(TENANT) == {(CACHE, "gen1")}


async def test_a_flip_under_a_lease_taken_over_changes_nothing(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    leases = Leases(metadata)
    old = await lease_on(metadata, owner="old")
    await leases.release(old)
    new = await lease_on(metadata, owner="new")
    for stale in (old, a_lease_nobody_gave()):
        with pytest.raises(LeaseLost):
            await metadata.flip(a_cache(), lease=stale, now=NOW)
    assert await metadata.cache(TENANT, CACHE) is None
    assert (await stored(metadata, "ctx_01")).status == "queued"
    assert await metadata.flip(a_cache(generation="gen2"), lease=new, now=NOW) == ["ctx_01"]
    with pytest.raises(LeaseLost):
        await metadata.flip(a_cache(), lease=old, now=NOW)
    assert (await metadata.cache(TENANT, CACHE)) == a_cache(generation="gen2")


async def test_a_flip_under_an_expired_lease_changes_nothing(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.create_context(a_context())
    lease = await lease_on(metadata)
    assert await redis.pexpire(KEYS.build_lease(CACHE), 0)
    with pytest.raises(LeaseLost, match="w1"):
        await metadata.flip(a_cache(), lease=lease, now=NOW)
    assert await metadata.cache(TENANT, CACHE) is None


async def test_the_same_owner_with_an_older_token_is_stale_too(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    old = await lease_on(metadata)
    await Leases(metadata).release(old)
    new = await lease_on(metadata)
    assert new.owner == old.owner
    with pytest.raises(LeaseLost):
        await metadata.flip(a_cache(), lease=old, now=NOW)


async def test_a_lease_of_another_cache_commits_nothing(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    lease = await lease_on(metadata, "d" * 64)
    with pytest.raises(Invalid, match="lease"):
        await metadata.flip(a_cache(), lease=lease, now=NOW)


async def test_a_flip_that_is_repeated_is_harmless(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    lease = await lease_on(metadata)
    assert await metadata.flip(a_cache(), lease=lease, now=NOW) == ["ctx_01"]
    assert await metadata.flip(a_cache(), lease=lease, now=NOW + 9) == []
    assert (await stored(metadata, "ctx_01")).ready_at == NOW
    assert await metadata.cache(TENANT, CACHE) == a_cache()


async def test_a_build_whose_contexts_were_all_deleted_is_not_committed(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.create_context(a_context())
    lease = await lease_on(metadata)
    await metadata.delete_context(TENANT, "ctx_01")
    with pytest.raises(Unreferenced):
        await metadata.flip(a_cache(), lease=lease, now=NOW)
    assert await every_key(redis) == {KEYS.build_lease(CACHE), KEYS.fence}


async def test_a_lower_ratio_never_replaces_a_higher_one(metadata: Metadata) -> None:
    await metadata.create_context(a_context("ctx_high", ratio=0.5))
    lease = await lease_on(metadata)
    high = a_cache(ratio=0.5, ratios=(0.1, 0.3, 0.5))
    await metadata.flip(high, lease=lease, now=NOW)
    await metadata.create_context(a_context("ctx_low", ratio=0.1))
    with pytest.raises(Conflict, match="higher ratio"):
        await metadata.flip(a_cache(generation="gen2"), lease=lease, now=NOW)
    assert await metadata.cache(TENANT, CACHE) == high


async def test_a_higher_ratio_replaces_the_cache_and_keeps_the_old_contexts_ready(
    metadata: Metadata,
) -> None:
    await metadata.create_context(a_context("ctx_low", ratio=0.3))
    lease = await lease_on(metadata)
    await metadata.flip(a_cache(), lease=lease, now=NOW)
    await metadata.create_context(a_context("ctx_high", ratio=0.5))
    assert await metadata.attach(TENANT, "ctx_high", NOW) is None
    high = a_cache(generation="gen2", ratio=0.5, ratios=(0.1, 0.3, 0.5), stored_bytes=500_000)
    assert await metadata.flip(high, lease=lease, now=NOW + 1) == ["ctx_high"]
    low = await stored(metadata, "ctx_low")
    assert (low.status, low.ready_at, low.stored_bytes) == ("ready", NOW, 500_000)
    assert low.ratios_available == (0.1, 0.3)


async def test_contexts_created_and_deleted_around_flips_are_never_left_behind(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.create_context(a_context("ctx_first"))
    lease = await lease_on(metadata)

    async def churn(number: int) -> None:
        await metadata.create_context(a_context(f"ctx_{number:03}"))
        if number % 2:
            await metadata.delete_context(TENANT, f"ctx_{number:03}")
        else:
            await metadata.attach(TENANT, f"ctx_{number:03}", NOW)

    async def flips() -> None:
        for _ in range(10):
            await metadata.flip(a_cache(), lease=lease, now=NOW)

    await asyncio.gather(flips(), *(churn(number) for number in range(40)))
    await metadata.flip(a_cache(), lease=lease, now=NOW)
    page = await metadata.contexts(TENANT, limit=100)
    assert [record.id for record in page.records] == sorted(
        ["ctx_first", *(f"ctx_{number:03}" for number in range(0, 40, 2))]
    )
    assert {record.status for record in page.records} == {"ready"}
    assert await redis.smembers(KEYS.references(CACHE)) == {record.id for record in page.records}
    assert await redis.smembers(KEYS.unfinished) == set()


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


async def test_a_quarantine_forgets_the_generation_and_rebuilds_what_was_ready(
    metadata: Metadata,
) -> None:
    await metadata.create_context(a_context("ctx_ready"))
    await metadata.create_context(a_context("ctx_failed", status="failed"))
    await metadata.create_context(a_context("ctx_more", ratio=0.9))
    await metadata.flip(a_cache(), lease=await lease_on(metadata), now=NOW)
    assert await metadata.quarantine(TENANT, CACHE, "gen1") == ["ctx_ready"]
    assert await metadata.cache(TENANT, CACHE) is None
    assert await metadata.live_generations(TENANT) == set()
    record = await stored(metadata, "ctx_ready")
    assert (record.status, record.stored_bytes, record.fraction) == ("rebuilding", None, 0.0)
    assert record.ratios_available == ()
    assert (await stored(metadata, "ctx_failed")).status == "failed"
    assert (await stored(metadata, "ctx_more")).status == "queued"
    assert sorted(await metadata.unfinished()) == [(TENANT, "ctx_more"), (TENANT, "ctx_ready")]
    assert await metadata.attach(TENANT, "ctx_ready", NOW) is None


async def test_a_quarantine_of_another_generation_than_the_committed_one_does_nothing(
    metadata: Metadata,
) -> None:
    await metadata.create_context(a_context())
    await metadata.flip(a_cache(generation="gen2"), lease=await lease_on(metadata), now=NOW)
    assert await metadata.quarantine(TENANT, CACHE, "gen1") == []
    assert await metadata.quarantine(TENANT, "d" * 64, "gen1") == []
    assert (await stored(metadata, "ctx_01")).status == "ready"
    assert await metadata.cache(TENANT, CACHE) == a_cache(generation="gen2")


async def test_a_rebuilt_context_becomes_ready_again(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    lease = await lease_on(metadata)
    await metadata.flip(a_cache(), lease=lease, now=NOW)
    await metadata.quarantine(TENANT, CACHE, "gen1")
    await metadata.set_building(TENANT, "ctx_01", rebuilding=True)
    again = a_cache(generation="gen2")
    assert await metadata.flip(again, lease=lease, now=NOW + 1) == ["ctx_01"]
    record = await stored(metadata, "ctx_01")
    assert (record.status, record.ready_at, record.stored_bytes) == ("ready", NOW + 1, 300_123)


async def test_restoring_writes_what_is_absent_and_never_over_what_is_there(
    metadata: Metadata,
) -> None:
    assert await metadata.restore_cache(a_cache())
    assert not await metadata.restore_cache(a_cache(generation="gen2"))
    assert await metadata.cache(TENANT, CACHE) == a_cache()
    assert await metadata.restore_context(a_context(status="ready"))
    assert not await metadata.restore_context(a_context(status="failed"))
    assert (await stored(metadata, "ctx_01")).status == "ready"
    with pytest.raises(Invalid, match="expired"):
        await metadata.restore_context(a_context("ctx_02", status="expired"))


async def test_the_store_id_is_none_until_bound_and_can_be_bound_anew(metadata: Metadata) -> None:
    assert await metadata.store_id() is None
    await metadata.bind_store("one")
    assert await metadata.store_id() == "one"
    await metadata.bind_store("two")
    assert await metadata.store_id() == "two"


async def walk(
    table: Metadata, limit: int, *, descending: bool = False, **filters: Any
) -> list[str]:
    ids: list[str] = []
    after: str | None = None
    while True:
        page = await table.contexts(
            TENANT, limit=limit, after=after, descending=descending, **filters
        )
        assert len(page.records) <= limit
        ids += [record.id for record in page.records]
        if not page.has_more:
            return ids
        assert len(page.records) == limit
        after = ids[-1]


@pytest.mark.parametrize("count", [0, 1, 3, 99, 100, 101, 205])
async def test_every_page_size_lists_each_context_once_in_order(
    metadata: Metadata, count: int
) -> None:
    ids = [f"ctx_{number:04}" for number in range(count)]
    await asyncio.gather(*(metadata.create_context(a_context(item)) for item in reversed(ids)))
    for limit in (1, 7, 100, 1000) if count < 100 else (50, 100, 1000):
        assert await walk(metadata, limit) == ids
        assert await walk(metadata, limit, descending=True) == ids[::-1]


async def test_pages_are_right_when_contexts_are_deleted_between_them(metadata: Metadata) -> None:
    ids = [f"ctx_{number:02}" for number in range(10)]
    for context_id in ids:
        await metadata.create_context(a_context(context_id))
    first = await metadata.contexts(TENANT, limit=4)
    assert [record.id for record in first.records] == ids[:4]
    # One already seen, the cursor itself, and one still to come.
    for gone in (ids[0], ids[3], ids[5]):
        await metadata.delete_context(TENANT, gone)
    second = await metadata.contexts(TENANT, limit=4, after=ids[3])
    assert [record.id for record in second.records] == [ids[4], ids[6], ids[7], ids[8]]
    assert second.has_more
    last = await metadata.contexts(TENANT, limit=4, after=ids[8])
    assert ([record.id for record in last.records], last.has_more) == ([ids[9]], False)


async def test_a_list_is_filtered_by_status_and_by_every_metadata_pair(metadata: Metadata) -> None:
    for number in range(250):
        await metadata.create_context(
            a_context(
                f"ctx_{number:03}",
                status="failed" if number % 2 else "queued",
                metadata={"tens": str(number // 10), "rest": str(number % 10)},
            )
        )
    assert await walk(metadata, 3, status="queued", metadata={"tens": "24"}) == [
        "ctx_240",
        "ctx_242",
        "ctx_244",
        "ctx_246",
        "ctx_248",
    ]
    assert await walk(metadata, 3, metadata={"tens": "24", "rest": "1"}) == ["ctx_241"]
    assert await walk(metadata, 3, metadata={"tens": "24", "other": "1"}) == []
    assert await walk(metadata, 3, status="ready") == []
    assert len(await walk(metadata, 60, status="failed")) == 125


async def test_a_page_of_nothing_is_refused(metadata: Metadata) -> None:
    with pytest.raises(Invalid, match="limit"):
        await metadata.contexts(TENANT, limit=0)


@pytest.mark.parametrize(
    "url", ["redis+sentinel://h:1/m", "redis+cluster://h:1", "http://h", "localhost:6379", ""]
)
async def test_an_unknown_scheme_is_named_and_the_password_is_not(url: str) -> None:
    with pytest.raises(ValueError, match="scheme") as caught:
        await Metadata.connect(url + "?password=secret" if url else url)
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, Invalid)


async def test_a_tenant_that_could_leave_its_slot_is_refused(metadata: Metadata) -> None:
    with pytest.raises(Invalid, match="tenant"):
        await metadata.context("a}b", "ctx_01")


async def test_nothing_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(MetadataUnavailable) as caught:
        await Metadata.connect(f"unix://{tmp_path}/none.sock")
    assert caught.value.retryable
    assert caught.value.code == "metadata_unavailable"


async def test_a_silent_server_is_unavailable_and_found_again_when_it_wakes(
    tmp_path: Path,
) -> None:
    store = EmbeddedStore(tmp_path)
    store.start()
    metadata = await Metadata.connect(store.redis_url, timeout_seconds=1)
    try:
        await metadata.create_context(a_context())
        pid = await process_id(store.redis_url)
        os.kill(pid, signal.SIGSTOP)
        try:
            outcomes = await asyncio.gather(
                metadata.context(TENANT, "ctx_01"),
                metadata.touch_context(TENANT, "ctx_01", NOW),
                metadata.contexts(TENANT, limit=1),
                return_exceptions=True,
            )
            assert {type(outcome) for outcome in outcomes} == {MetadataUnavailable}
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await stored(metadata, "ctx_01")).status == "queued"
    finally:
        await metadata.close()
        store.stop()


async def test_a_restarted_server_is_found_again_with_its_records_and_scripts(
    tmp_path: Path,
) -> None:
    store = EmbeddedStore(tmp_path)
    store.start()
    metadata = await Metadata.connect(store.redis_url)
    try:
        # Several connections, all of them stale afterwards.
        await asyncio.gather(
            *(metadata.create_context(a_context(f"ctx_{number}")) for number in range(5))
        )
        await asyncio.to_thread(store.stop)
        with pytest.raises(MetadataUnavailable):
            await metadata.unfinished()
        await asyncio.to_thread(store.start)
        records = await asyncio.gather(*(stored(metadata, f"ctx_{n}") for n in range(5)))
        assert [record.status for record in records] == ["queued"] * 5
        assert await metadata.touch_context(TENANT, "ctx_0", NOW)
    finally:
        await metadata.close()
        store.stop()


async def test_a_cancelled_call_leaves_the_connection_usable(metadata: Metadata) -> None:
    await metadata.create_context(a_context(name="mine"))
    for _ in range(20):
        call = asyncio.create_task(metadata.contexts(TENANT, limit=10))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await stored(metadata, "ctx_01")).name == "mine"


async def test_more_calls_at_once_than_connections_all_succeed(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    touched = await asyncio.gather(
        *(metadata.touch_context(TENANT, "ctx_01", NOW) for _ in range(300))
    )
    assert all(touched)
    assert (await stored(metadata, "ctx_01")).queries == 300
