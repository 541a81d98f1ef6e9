"""What a tenant is charged is at every moment what its records say."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from redis.asyncio import Redis

from kvkeep_storage.errors import Conflict, Gone, NotFound, QuotaExceeded
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.quotas import Quotas, Usage
from kvkeep_storage.records import UNFINISHED, CacheRecord, ContextRecord
from kvkeep_storage.redis_keys import TenantKeys

from .samples import TENANT, a_cache, a_context, every_key

pytestmark = pytest.mark.anyio
KEYS = TenantKeys(TENANT)
ESTIMATE = 300_000
STORED = a_cache().stored_bytes


async def _commit(metadata: Metadata, cache: CacheRecord) -> None:
    leases = Leases(metadata)
    lease = await leases.acquire_build(TENANT, cache.cache_id, "w1")
    assert lease is not None
    await metadata.flip(cache, lease=lease, now=1.0)
    await leases.release(lease)


async def _expected(metadata: Metadata) -> dict[str, int]:
    """The charges, worked out from nothing but the records."""
    records: list[ContextRecord] = list((await metadata.contexts(TENANT, limit=1000)).records)
    charges: dict[str, int] = {}
    for cache_id in {record.cache_id for record in records}:
        cache = await metadata.cache(TENANT, cache_id)
        stored = 0 if cache is None else cache.stored_bytes
        waiting = [
            math.ceil(record.full_bytes * record.ratio)
            for record in records
            if record.cache_id == cache_id and record.status in UNFINISHED
        ]
        charges[cache_id] = max([stored, *waiting])
    return {cache_id: charge for cache_id, charge in charges.items() if charge}


async def _charges(redis: Redis) -> dict[str, int]:
    return {name: int(text) for name, text in (await redis.hgetall(KEYS.charges)).items()}


async def _assert_exact(metadata: Metadata, redis: Redis) -> None:
    expected, charges = await _expected(metadata), await _charges(redis)
    assert charges.pop(":total", 0) == sum(charges.values())
    assert charges == expected
    usage = await metadata.usage(TENANT)
    page = await metadata.contexts(TENANT, limit=1000)
    awaiting = [record for record in page.records if record.awaits_build]
    assert usage == Usage(len(page.records), len(awaiting), sum(expected.values()))


async def test_a_context_is_charged_by_estimate_until_its_real_size_is_known(
    metadata: Metadata,
) -> None:
    assert await metadata.usage(TENANT) == Usage(0, 0, 0)
    await metadata.create_context(a_context())
    assert await metadata.usage(TENANT) == Usage(1, 1, ESTIMATE)
    await _commit(metadata, a_cache())
    assert await metadata.usage(TENANT) == Usage(1, 0, STORED)


async def test_a_shared_cache_is_charged_once_and_until_its_last_context_goes(
    metadata: Metadata, redis: Redis
) -> None:
    for context_id in ("ctx_01", "ctx_02", "ctx_03"):
        await metadata.create_context(a_context(context_id))
    assert (await metadata.usage(TENANT)).bytes == ESTIMATE
    await _commit(metadata, a_cache())
    await metadata.delete_context(TENANT, "ctx_01")
    await metadata.delete_context(TENANT, "ctx_02")
    assert (await metadata.usage(TENANT)).bytes == STORED
    await metadata.delete_context(TENANT, "ctx_03")
    assert await metadata.usage(TENANT) == Usage(0, 0, 0)
    assert await every_key(redis) == {KEYS.fence}


async def test_a_build_that_fails_for_good_is_refunded(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    assert await metadata.fail_context(TENANT, "ctx_01", "build_failed", "gave up")
    assert await metadata.usage(TENANT) == Usage(1, 0, 0)


async def test_a_higher_ratio_is_charged_for_while_it_is_waited_for(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    await _commit(metadata, a_cache())
    await metadata.create_context(a_context("ctx_02", ratio=0.5))
    assert (await metadata.usage(TENANT)).bytes == 500_000
    await metadata.fail_context(TENANT, "ctx_02", "build_failed", "gave up")
    assert (await metadata.usage(TENANT)).bytes == STORED


async def test_a_quarantined_cache_is_charged_as_what_will_be_built_again(
    metadata: Metadata,
) -> None:
    await metadata.create_context(a_context())
    await _commit(metadata, a_cache(stored_bytes=900_000))
    await metadata.quarantine(TENANT, a_cache().cache_id, "gen1")
    assert await metadata.usage(TENANT) == Usage(1, 1, ESTIMATE)


@pytest.mark.parametrize(
    ("quotas", "which", "limit", "used", "asked"),
    [
        (Quotas(contexts=1), "contexts", 1, 1, 1),
        (Quotas(queued=1), "queued", 1, 1, 1),
        (Quotas(bytes=599_999), "bytes", 599_999, ESTIMATE, ESTIMATE),
    ],
    ids=["contexts", "queued", "bytes"],
)
async def test_what_passes_a_quota_is_refused_with_the_numbers_and_leaves_nothing(
    metadata: Metadata, redis: Redis, quotas: Quotas, which: str, limit: int, used: int, asked: int
) -> None:
    await metadata.create_context(a_context(), quotas)
    before = await every_key(redis)
    other = a_context("ctx_02", cache_id="d" * 64)
    with pytest.raises(QuotaExceeded) as refused:
        await metadata.create_context(other, quotas)
    error = refused.value
    assert (error.quota, error.limit, error.used, error.asked) == (which, limit, used, asked)
    assert await every_key(redis) == before
    await _assert_exact(metadata, redis)
    await metadata.delete_context(TENANT, "ctx_01")
    await metadata.create_context(other, quotas)


async def test_what_is_stored_already_needs_no_room_and_no_place_in_the_queue(
    metadata: Metadata,
) -> None:
    await metadata.create_context(a_context())
    await _commit(metadata, a_cache())
    await metadata.create_context(a_context("ctx_02"), Quotas(queued=0, bytes=0))
    # A ratio that it is not cut at is another matter.
    with pytest.raises(QuotaExceeded, match="queued"):
        await metadata.create_context(a_context("ctx_03", ratio=0.25), Quotas(queued=0))


async def test_requests_at_one_time_cannot_pass_a_quota_together(metadata: Metadata) -> None:
    quotas = Quotas(bytes=5 * ESTIMATE)
    records = [a_context(f"ctx_{i:02d}", cache_id=f"{i:064d}") for i in range(20)]
    outcomes = await asyncio.gather(
        *(metadata.create_context(record, quotas) for record in records), return_exceptions=True
    )
    assert sum(outcome is None for outcome in outcomes) == 5
    assert await metadata.usage(TENANT) == Usage(5, 5, 5 * ESTIMATE)


async def test_one_tenants_usage_is_no_other_tenants(metadata: Metadata) -> None:
    await metadata.create_context(a_context(), Quotas(contexts=1, queued=1, bytes=ESTIMATE))
    other = a_context("ctx_02", tenant="other")
    await metadata.create_context(other, Quotas(contexts=1, queued=1, bytes=ESTIMATE))
    assert await metadata.usage("other") == Usage(1, 1, ESTIMATE)


async def test_charges_that_are_lost_or_wrong_are_counted_again(
    metadata: Metadata, redis: Redis
) -> None:
    for i in range(3):
        await metadata.create_context(a_context(f"ctx_{i}", cache_id=f"{i:064d}"))
    await _commit(metadata, a_cache(cache_id=f"{1:064d}"))
    await redis.delete(KEYS.waiting(f"{0:064d}"))
    await redis.hset(KEYS.charges, mapping={":total": 7, "e" * 64: 12, f"{1:064d}": 5})
    assert await metadata.recount(TENANT) == 2 * ESTIMATE + STORED
    await _assert_exact(metadata, redis)


async def test_a_damaged_record_is_charged_nothing_and_stops_nothing(
    metadata: Metadata, redis: Redis
) -> None:
    for context_id in ("ctx_01", "ctx_02"):
        await metadata.create_context(a_context(context_id))
    await _commit(metadata, a_cache())
    await redis.hset(KEYS.context("ctx_01"), mapping={"ratio": "damaged", "full_bytes": "?"})
    assert set(await metadata.quarantine(TENANT, a_cache().cache_id, "gen1")) == {
        "ctx_01",
        "ctx_02",
    }
    assert await metadata.usage(TENANT) == Usage(2, 2, ESTIMATE)
    assert await metadata.recount(TENANT) == ESTIMATE
    await metadata.delete_context(TENANT, "ctx_02")
    assert (await metadata.usage(TENANT)).bytes == 0
    await metadata.delete_context(TENANT, "ctx_01")
    assert await every_key(redis) == {KEYS.fence}


@pytest.mark.parametrize("seed", range(6))
async def test_charges_equal_the_records_after_any_sequence_of_changes(
    metadata: Metadata, redis: Redis, seed: int
) -> None:
    """Every step may be refused; a crash between two steps is just a sequence that ends there."""
    chosen = random.Random(seed)
    quotas = Quotas(contexts=9, queued=6, bytes=3_000_000)
    ids = [f"ctx_{i:02d}" for i in range(12)]
    cache_ids = [f"{i:064d}" for i in range(4)]
    generations = iter(range(10_000))
    ratios = (0.1, 0.3, 0.5)

    def context_id() -> str:
        return chosen.choice(ids)

    def cache_id() -> str:
        return chosen.choice(cache_ids)

    async def create() -> None:
        record = a_context(
            context_id(),
            cache_id=cache_id(),
            ratio=chosen.choice(ratios),
            full_bytes=chosen.randrange(2_000_000),
        )
        await metadata.create_context(record, quotas)

    async def commit() -> None:
        built = chosen.choice(ratios)
        cache = a_cache(
            cache_id=cache_id(),
            generation=f"g{next(generations)}",
            ratio=built,
            ratios=tuple(ratio for ratio in ratios if ratio <= built),
            stored_bytes=chosen.randrange(1_000_000),
        )
        lease = await Leases(metadata).acquire_build(TENANT, cache.cache_id, "w1")
        assert lease is not None
        try:
            await metadata.flip(cache, lease=lease, now=1.0)
        finally:
            await Leases(metadata).release(lease)

    async def forget(how: Callable[[str, str, str], Awaitable[object]]) -> None:
        wanted = cache_id()
        if (cache := await metadata.cache(TENANT, wanted)) is not None:
            await how(TENANT, wanted, cache.generation)

    steps: list[Callable[[], Awaitable[object]]] = [
        create,
        create,
        create,
        commit,
        commit,
        lambda: metadata.attach(TENANT, context_id(), 2.0),
        lambda: metadata.set_building(TENANT, context_id(), rebuilding=chosen.random() < 0.5),
        lambda: metadata.fail_context(TENANT, context_id(), "code", "detail"),
        lambda: metadata.delete_context(TENANT, context_id()),
        lambda: metadata.rebuild_context(TENANT, context_id(), quotas),
        lambda: forget(metadata.quarantine),
        lambda: forget(metadata.evict),
        lambda: metadata.recount(TENANT),
        lambda: metadata.restore_cache(a_cache(cache_id=cache_ids[0])),
    ]
    for _ in range(150):
        with suppress(Conflict, NotFound, QuotaExceeded, Gone):
            await chosen.choice(steps)()
        await _assert_exact_with_orphan_caches(metadata, redis)
    for each in ids:
        await metadata.delete_context(TENANT, each)
    for each in cache_ids:
        # Restored without a context, as a reindex of a deleted one may leave it.
        if (cache := await metadata.cache(TENANT, each)) is not None:
            assert await metadata.evict(TENANT, each, cache.generation) == "evicted"
    assert await every_key(redis) - {KEYS.fence} == set()
    assert await metadata.usage(TENANT) == Usage(0, 0, 0)


async def _assert_exact_with_orphan_caches(metadata: Metadata, redis: Redis) -> None:
    expected, charges = await _expected(metadata), await _charges(redis)
    for cache_id, _ in await metadata.live_generations(TENANT):
        cache = await metadata.cache(TENANT, cache_id)
        if cache is not None and cache.stored_bytes:
            expected.setdefault(cache_id, cache.stored_bytes)
    assert charges.pop(":total", 0) == sum(charges.values())
    assert charges == expected
