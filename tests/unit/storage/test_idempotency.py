import asyncio

import pytest
from redis.asyncio import Redis

from kvkeep_storage.errors import RecordCorrupt
from kvkeep_storage.idempotency import IN_FLIGHT_SECONDS
from kvkeep_storage.metadata import InFlight, Metadata, Mismatch, Replay, Started
from kvkeep_storage.redis_keys import TenantKeys

from .samples import TENANT

pytestmark = pytest.mark.anyio
NAME = TenantKeys(TENANT).idempotency("key")


async def test_the_answer_of_the_first_request_is_replayed_byte_for_byte(
    metadata: Metadata,
) -> None:
    assert await metadata.idempotency_begin(TENANT, "key", "digest", 60) == Started()
    assert await metadata.idempotency_begin(TENANT, "key", "digest", 60) == InFlight()
    body = bytes(range(256))
    await metadata.idempotency_finish(TENANT, "key", 202, body, {"location": "/x"})
    replay = await metadata.idempotency_begin(TENANT, "key", "digest", 60)
    assert replay == Replay(202, body, {"location": "/x"})


async def test_another_body_under_the_same_key_never_gets_the_first_answer(
    metadata: Metadata,
) -> None:
    await metadata.idempotency_begin(TENANT, "key", "digest", 60)
    assert await metadata.idempotency_begin(TENANT, "key", "other", 60) == Mismatch()
    await metadata.idempotency_finish(TENANT, "key", 202, b"{}", {})
    assert await metadata.idempotency_begin(TENANT, "key", "other", 60) == Mismatch()


async def test_tenants_do_not_share_keys(metadata: Metadata) -> None:
    await metadata.idempotency_begin(TENANT, "key", "digest", 60)
    await metadata.idempotency_finish(TENANT, "key", 202, b"secret", {})
    assert await metadata.idempotency_begin("other", "key", "digest", 60) == Started()


@pytest.mark.parametrize("key", ["", "k" * 5000, "{x}:é\ud800"])
async def test_any_text_is_a_key(metadata: Metadata, key: str) -> None:
    assert await metadata.idempotency_begin(TENANT, key, "digest", 60) == Started()
    assert await metadata.idempotency_begin(TENANT, key, "digest", 60) == InFlight()


async def test_an_abandoned_key_is_free_and_a_finished_one_is_not(metadata: Metadata) -> None:
    await metadata.idempotency_begin(TENANT, "key", "digest", 60)
    await metadata.idempotency_abandon(TENANT, "key")
    assert await metadata.idempotency_begin(TENANT, "key", "other", 60) == Started()
    await metadata.idempotency_finish(TENANT, "key", 200, b"", {})
    await metadata.idempotency_abandon(TENANT, "key")
    assert await metadata.idempotency_begin(TENANT, "key", "other", 60) == Replay(200, b"", {})


async def test_of_many_requests_at_once_exactly_one_starts(metadata: Metadata) -> None:
    outcomes = await asyncio.gather(
        *(metadata.idempotency_begin(TENANT, "key", "digest", 60) for _ in range(20))
    )
    assert outcomes.count(Started()) == 1
    assert outcomes.count(InFlight()) == 19


async def test_a_key_left_by_a_dead_process_is_free_long_before_an_answer_is(
    metadata: Metadata, redis: Redis
) -> None:
    await metadata.idempotency_begin(TENANT, "key", "digest", 86_400)
    assert 0 < await redis.ttl(NAME) <= IN_FLIGHT_SECONDS
    await metadata.idempotency_finish(TENANT, "key", 200, b"", {})
    assert IN_FLIGHT_SECONDS < await redis.ttl(NAME) <= 86_400


async def test_finishing_a_key_that_ran_out_keeps_nothing(metadata: Metadata, redis: Redis) -> None:
    await metadata.idempotency_finish(TENANT, "key", 200, b"", {})
    assert not await redis.exists(NAME)


@pytest.mark.parametrize(
    "answer", ["{", "[]", '{"status": 200}', '{"status":1,"body":"!","headers":{}}']
)
async def test_a_damaged_answer_is_an_error(metadata: Metadata, redis: Redis, answer: str) -> None:
    await metadata.idempotency_begin(TENANT, "key", "digest", 60)
    await redis.hset(NAME, "answer", answer)
    with pytest.raises(RecordCorrupt):
        await metadata.idempotency_begin(TENANT, "key", "digest", 60)
