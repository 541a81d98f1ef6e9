"""A claim that is cancelled, or whose reply is lost, costs neither a job nor an attempt."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from kvkeep_storage.jobs import Job, Jobs
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_keys import BUILDS
from kvkeep_storage.redis_link import RedisLink, Reply, Word

from .samples import TENANT

pytestmark = pytest.mark.anyio
GROUP = "builders"


async def claimed(jobs: Jobs, owner: str, block_seconds: float = 0) -> Job:
    job = await jobs.claim(owner, block_seconds)
    assert job is not None
    return job


async def pending(redis: Redis) -> list[Any]:
    found: list[Any] = await redis.xpending_range(BUILDS, GROUP, "-", "+", 100)
    return found


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8, 12, 20, 40])
async def test_a_cancelled_claim_costs_neither_a_job_nor_time_nor_an_attempt(
    metadata: Metadata, steps: int
) -> None:
    jobs = Jobs(metadata, ttl_seconds=1000)
    claiming = asyncio.create_task(jobs.claim("w1", 30))
    enqueuing = asyncio.create_task(jobs.enqueue(TENANT, "ctx_01"))
    for _ in range(steps):
        await asyncio.sleep(0)
    claiming.cancel()
    await enqueuing
    (outcome,) = await asyncio.gather(claiming, return_exceptions=True)
    assert isinstance(outcome, Job | asyncio.CancelledError)
    job = outcome if isinstance(outcome, Job) else await claimed(jobs, "w2", 30)
    assert (job.context_id, job.attempts) == ("ctx_01", 1)


class HeldLink(RedisLink):
    """Keeps the replies of the server back until they are released."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.answered, self.released = asyncio.Event(), asyncio.Event()

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Word] = ()) -> Reply:
        reply = await super().run(script, keys, args)
        self.answered.set()
        await self.released.wait()
        return reply


async def test_a_claim_cancelled_after_the_server_has_answered_gives_the_job_back(
    metadata: Metadata, valkey_url: str
) -> None:
    await Jobs(metadata).enqueue(TENANT, "ctx_01")
    link = HeldLink.open(valkey_url, 2.0)
    claiming = asyncio.create_task(
        Jobs(Metadata(link, time.time), ttl_seconds=1000).claim("w1", 30)
    )
    await link.answered.wait()
    claiming.cancel()
    link.released.set()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    job = await claimed(Jobs(metadata, ttl_seconds=1000), "w2")
    assert (job.context_id, job.attempts, job.owner) == ("ctx_01", 1, "w2")
    await link.close()


async def test_a_job_whose_reply_was_lost_comes_with_the_next_claim_and_uncounted(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata, ttl_seconds=1000)
    for number in range(3):
        await jobs.enqueue(TENANT, f"ctx_{number}")
    held = await claimed(jobs, "w1")
    # What a lost reply leaves: an entry of this owner that it never heard of.
    await redis.xreadgroup(GROUP, "w1", {BUILDS: ">"}, count=1)
    lost = await claimed(jobs, "w1")
    assert (held.context_id, lost.context_id, lost.attempts) == ("ctx_0", "ctx_1", 1)
    assert [entry["times_delivered"] for entry in await pending(redis)] == [1, 1]
    assert (await claimed(jobs, "w1")).context_id == "ctx_2"
    assert await jobs.claim("w1", 0) is None
