import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import LeaseLost, MetadataUnavailable
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import BuildLease
from kvkeep_storage.redis_keys import TenantKeys

from .samples import CACHE, TENANT

pytestmark = pytest.mark.anyio
KEYS = TenantKeys(TENANT)
LEASE = KEYS.build_lease(CACHE)
READERS = KEYS.read_leases(CACHE)


async def acquired(leases: Leases, owner: str, ttl: float | None = None) -> BuildLease:
    lease = await leases.acquire_build(TENANT, CACHE, owner, ttl)
    assert lease is not None
    return lease


async def test_of_many_builders_at_once_exactly_one_gets_the_lease(metadata: Metadata) -> None:
    leases = Leases(metadata)
    given = await asyncio.gather(
        *(leases.acquire_build(TENANT, CACHE, f"w{number}") for number in range(20))
    )
    assert sum(lease is not None for lease in given) == 1


async def test_a_held_lease_is_not_given_to_its_own_owner_again(metadata: Metadata) -> None:
    leases = Leases(metadata)
    await acquired(leases, "w1")
    assert await leases.acquire_build(TENANT, CACHE, "w1") is None


async def test_leases_of_other_caches_and_tenants_do_not_disturb(metadata: Metadata) -> None:
    leases = Leases(metadata)
    await acquired(leases, "w1")
    assert await leases.acquire_build(TENANT, "d" * 64, "w2") is not None
    assert await leases.acquire_build("other", CACHE, "w3") is not None
    assert await leases.is_building(TENANT, CACHE)
    assert not await leases.is_building(TENANT, "e" * 64)


async def test_fencing_tokens_only_grow_even_when_redis_forgets_everything(
    metadata: Metadata, redis: Redis
) -> None:
    leases = Leases(metadata)
    tokens = []
    for number in range(4):
        lease = await acquired(leases, f"w{number}")
        tokens.append(lease.fencing_token)
        await leases.release(lease)
    await redis.flushall()
    # The counter starts again at the clock, whose seconds grow only by waiting.
    first = (await acquired(leases, "w9")).fencing_token
    assert tokens == sorted(set(tokens))
    assert first // 1_000_000 >= tokens[0] // 1_000_000 > 1_700_000_000


async def test_a_lease_from_before_a_flush_cannot_touch_a_new_one(
    metadata: Metadata, redis: Redis
) -> None:
    leases = Leases(metadata)
    old = await acquired(leases, "w1")
    await redis.flushall()
    new = await acquired(leases, "w2")
    with pytest.raises(LeaseLost):
        await leases.renew(old)
    await leases.release(old)
    await leases.renew(new)


async def test_a_lease_runs_out_by_itself_and_renewing_makes_it_last(
    metadata: Metadata, redis: Redis
) -> None:
    leases = Leases(metadata, ttl_seconds=3000)
    lease = await acquired(leases, "w1")
    assert 0 < await redis.pttl(LEASE) <= 3_000_000
    await redis.pexpire(LEASE, 500_000)
    await leases.renew(lease)
    assert await redis.pttl(LEASE) > 500_000
    short = await leases.acquire_build(TENANT, "d" * 64, "w1", ttl=300)
    assert short is not None
    assert 0 < await redis.pttl(KEYS.build_lease("d" * 64)) <= 300_000


async def test_an_expired_lease_cannot_be_renewed_even_if_nobody_took_it(
    metadata: Metadata, redis: Redis
) -> None:
    leases = Leases(metadata)
    lease = await acquired(leases, "w1")
    await redis.pexpire(LEASE, 0)
    with pytest.raises(LeaseLost, match="w1") as caught:
        await leases.renew(lease)
    assert caught.value.code == "lease_lost"


async def test_a_late_release_does_not_free_the_lease_of_the_next_holder(
    metadata: Metadata, redis: Redis
) -> None:
    leases = Leases(metadata)
    old = await acquired(leases, "w1")
    await redis.pexpire(LEASE, 0)
    new = await acquired(leases, "w1")
    await leases.release(old)
    await leases.renew(new)
    await leases.release(new)
    assert not await leases.is_building(TENANT, CACHE)


async def test_readers_are_counted_and_none_is_left_after_the_last(
    metadata: Metadata, redis: Redis
) -> None:
    leases = Leases(metadata)
    assert await leases.readers(TENANT, CACHE) == 0
    async with leases.read_lease(TENANT, CACHE), leases.read_lease(TENANT, CACHE):
        assert await leases.readers(TENANT, CACHE) == 2
        assert await leases.readers("other", CACHE) == 0
    assert await leases.readers(TENANT, CACHE) == 0
    assert not await redis.exists(READERS)


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_read_lease_ends_however_its_block_ends(
    metadata: Metadata, error: type[BaseException]
) -> None:
    leases = Leases(metadata)
    with pytest.raises(error):
        async with leases.read_lease(TENANT, CACHE):
            raise error
    assert await leases.readers(TENANT, CACHE) == 0


async def test_a_cancelled_reader_leaves_no_lease_and_no_task(metadata: Metadata) -> None:
    leases = Leases(metadata, ttl_seconds=60, renew_seconds=0.001)
    holding = asyncio.Event()

    async def read() -> None:
        async with leases.read_lease(TENANT, CACHE):
            holding.set()
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    for _ in range(20):
        holding.clear()
        reader = asyncio.create_task(read())
        await holding.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    assert await leases.readers(TENANT, CACHE) == 0
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("times", [1, 2])
async def test_a_reader_cancelled_while_it_takes_or_gives_back_leaves_no_lease(
    metadata: Metadata, times: int
) -> None:
    leases = Leases(metadata, ttl_seconds=60, renew_seconds=0.001)

    async def read() -> None:
        async with leases.read_lease(TENANT, CACHE):
            await asyncio.sleep(0)

    # After so many turns of the loop: as it sends, waits for the reply, renews, gives back.
    for turns in range(60):
        reader = asyncio.create_task(read())
        for _ in range(times):
            for _ in range(turns):
                await asyncio.sleep(0)
            reader.cancel()
        await asyncio.wait([reader])
    async with asyncio.timeout(30):
        while await leases.readers(TENANT, CACHE):  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)


async def test_a_read_lease_is_renewed_while_it_is_held(metadata: Metadata, redis: Redis) -> None:
    leases = Leases(metadata, ttl_seconds=60, renew_seconds=0.01)
    async with leases.read_lease(TENANT, CACHE):
        # Forgotten by the server, it comes back by itself.
        await redis.delete(READERS)
        async with asyncio.timeout(30):
            while await leases.readers(TENANT, CACHE) == 0:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
    assert await leases.readers(TENANT, CACHE) == 0


async def test_field_21_a_dead_readers_lease_runs_out(metadata: Metadata, redis: Redis) -> None:
    leases = Leases(metadata, ttl_seconds=60)
    async with leases.read_lease(TENANT, CACHE):
        await redis.zadd(READERS, {"dead": 1.0})
        assert await leases.readers(TENANT, CACHE) == 1
        assert 0 < await redis.pttl(READERS) <= 60_000


async def test_voiding_ends_every_lease_of_every_tenant_and_nothing_else(
    metadata: Metadata, redis: Redis
) -> None:
    leases = Leases(metadata)
    held = await acquired(leases, "w1")
    assert await leases.acquire_build("other", CACHE, "w1") is not None
    await redis.zadd(READERS, {"dead": 9e15})
    await redis.set(KEYS.context("x:lease:y"), "kept")
    await leases.void_all()
    assert await leases.readers(TENANT, CACHE) == 0
    with pytest.raises(LeaseLost):
        await leases.renew(held)
    assert await leases.acquire_build("other", CACHE, "w2") is not None
    assert await redis.get(KEYS.context("x:lease:y")) == "kept"
    # The counter stays: what was given out before is refused for ever.
    assert (await acquired(leases, "w2")).fencing_token > held.fencing_token


async def test_a_reader_whose_server_went_away_ends_without_an_error(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path)
    store.start()
    metadata = await Metadata.connect(store.redis_url)
    leases = Leases(metadata, renew_seconds=0.01)
    try:
        async with leases.read_lease(TENANT, CACHE):
            store.stop()
        with pytest.raises(MetadataUnavailable):
            async with leases.read_lease(TENANT, CACHE):
                pytest.fail("a lease without a server")
    finally:
        await metadata.close()
        store.stop()
