import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from kvkeep_storage.errors import (
    Conflict,
    Invalid,
    LeaseLost,
    Unreferenced,
)
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import BuildLease
from kvkeep_storage.redis_keys import TenantKeys

from .samples import CACHE, TENANT, a_cache, a_context, a_lease_nobody_gave, every_key, stored

pytestmark = pytest.mark.anyio
NOW = 1_790_000_500.75
KEYS = TenantKeys(TENANT)


async def lease_on(metadata: Metadata, cache_id: str = CACHE, owner: str = "w1") -> BuildLease:
    lease = await Leases(metadata).acquire_build(TENANT, cache_id, owner)
    assert lease is not None
    return lease


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

    assert sorted(ready) == ["ctx_building", "ctx_queued"]
    assert await metadata.cache(TENANT, CACHE) == a_cache()
    built = await stored(metadata, "ctx_building")
    assert (built.status, built.stage, built.fraction) == ("ready", None, 1.0)
    assert (built.ready_at, built.ratio_achieved) == (NOW, 0.3001)
    assert (built.stored_bytes, built.timings) == (300_123, a_cache().timings)
    assert built.ratios_available == (0.05, 0.1, 0.15, 0.2, 0.3)
    assert (await stored(metadata, "ctx_queued")).ratios_available == (0.05, 0.1)
    # It would be answered at another ratio than it asked for.
    assert (await stored(metadata, "ctx_between")).status == "queued"
    assert (await stored(metadata, "ctx_failed")).status == "failed"
    assert (await stored(metadata, "ctx_more")).status == "queued"
    assert (await stored(metadata, "ctx_other")).status == "queued"
    assert await redis.smembers(KEYS.unfinished) == {"ctx_between", "ctx_more", "ctx_other"}
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


def in_the_gap(
    monkeypatch: pytest.MonkeyPatch, metadata: Metadata, change: Callable[[], Awaitable[object]]
) -> None:
    """Make one change right after the next reading of a cache's references."""
    read = metadata.link.members
    changes = [change]

    async def read_then_change(key: str) -> list[str]:
        found = await read(key)
        if changes and key == KEYS.references(CACHE):
            await changes.pop()()
        return found

    monkeypatch.setattr(metadata.link, "members", read_then_change)


async def test_a_context_created_as_the_flip_begins_is_made_ready_too(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    await metadata.create_context(a_context("ctx_01"))
    lease = await lease_on(metadata)
    in_the_gap(monkeypatch, metadata, lambda: metadata.create_context(a_context("ctx_02")))
    ready = await metadata.flip(a_cache(), lease=lease, now=NOW)
    assert ready == ["ctx_01", "ctx_02"]


async def test_a_context_deleted_as_the_flip_begins_does_not_come_back(
    metadata: Metadata, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await metadata.create_context(a_context("ctx_01"))
    await metadata.create_context(a_context("ctx_02"))
    lease = await lease_on(metadata)

    async def replace_one() -> None:
        await metadata.delete_context(TENANT, "ctx_01")
        await metadata.create_context(a_context("ctx_03"))

    in_the_gap(monkeypatch, metadata, replace_one)
    assert await metadata.flip(a_cache(), lease=lease, now=NOW) == ["ctx_02", "ctx_03"]
    assert not await redis.exists(KEYS.context("ctx_01"))


async def test_the_last_context_deleted_as_the_flip_begins_leaves_no_cache(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    await metadata.create_context(a_context())
    lease = await lease_on(metadata)
    in_the_gap(monkeypatch, metadata, lambda: metadata.delete_context(TENANT, "ctx_01"))
    with pytest.raises(Unreferenced):
        await metadata.flip(a_cache(), lease=lease, now=NOW)
    assert await metadata.cache(TENANT, CACHE) is None


async def test_a_context_attached_as_the_quarantine_begins_is_rebuilt_too(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    await metadata.create_context(a_context("ctx_01"))
    await metadata.flip(a_cache(), lease=await lease_on(metadata), now=NOW)

    async def create_and_attach() -> None:
        await metadata.create_context(a_context("ctx_02"))
        assert await metadata.attach(TENANT, "ctx_02", NOW) is not None

    in_the_gap(monkeypatch, metadata, create_and_attach)
    assert await metadata.quarantine(TENANT, CACHE, "gen1") == ["ctx_01", "ctx_02"]
    assert (await stored(metadata, "ctx_02")).status == "rebuilding"


async def test_references_that_never_rest_end_in_a_conflict(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    await metadata.create_context(a_context())
    lease = await lease_on(metadata)

    async def outdated(key: str) -> list[str]:
        return ["ctx_other"]

    monkeypatch.setattr(metadata.link, "members", outdated)
    with pytest.raises(Conflict, match="changed"):
        await metadata.flip(a_cache(), lease=lease, now=NOW)
    await metadata.restore_cache(a_cache())
    with pytest.raises(Conflict, match="changed"):
        await metadata.quarantine(TENANT, CACHE, "gen1")


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
