import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import Invalid, LeaseLost, RecordCorrupt
from kvkeep_storage.jobs import MAX_ATTEMPTS, REFUSED_SECONDS, Job, Jobs
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_keys import BUILDS, refusals

from .samples import TENANT, a_context

pytestmark = pytest.mark.anyio
GROUP = "builders"


async def claimed(jobs: Jobs, owner: str, block_seconds: float = 0) -> Job:
    job = await jobs.claim(owner, block_seconds)
    assert job is not None
    return job


async def fall_silent(redis: Redis, job: Job, for_ms: int = 10_000) -> None:
    """The owner of a job dies: its last heartbeat is now this long ago."""
    await redis.xclaim(BUILDS, GROUP, job.owner, 0, [job.id], idle=for_ms, justid=True)


async def pending(redis: Redis) -> list[Any]:
    found: list[Any] = await redis.xpending_range(BUILDS, GROUP, "-", "+", 100)
    return found


async def test_jobs_come_in_order_each_to_one_worker_and_go_when_acknowledged(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    assert await jobs.claim("w1", 0) is None
    for number in range(3):
        await jobs.enqueue(TENANT, f"ctx_{number}")
    taken = [await claimed(jobs, owner) for owner in ("w1", "w2", "w1")]
    assert [job.context_id for job in taken] == ["ctx_0", "ctx_1", "ctx_2"]
    assert [(job.tenant, job.attempts) for job in taken] == [(TENANT, 1)] * 3
    assert await jobs.claim("w3", 0) is None
    for job in taken:
        assert await jobs.ack(job)
        assert not await jobs.ack(job)
    assert await redis.xlen(BUILDS) == 0
    assert await pending(redis) == []


async def test_a_job_that_every_living_builder_refuses_is_given_up_in_its_time(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata, ttl_seconds=1000, retry_seconds=0, refused_seconds=0)
    await jobs.enqueue(TENANT, "ctx_01")
    await jobs.retry_later(await claimed(jobs, "w2"), counted=False)
    job = await claimed(jobs, "w1")
    assert not await jobs.refuse(job), "w2 may be able to"
    await jobs.retry_later(job, counted=False)
    assert await jobs.num_builders() == 2
    job = await claimed(jobs, "w2")
    assert await jobs.refuse(job)
    await jobs.retry_later(job, counted=False)
    # Somebody new: it may be able to.
    await jobs.retry_later(await claimed(jobs, "w3"), counted=False)
    assert not await jobs.refuse(await claimed(jobs, "w1"))
    assert 0 < await redis.ttl(refusals(job.id)) <= 2 * REFUSED_SECONDS


async def test_builders_of_an_earlier_start_count_no_more(metadata: Metadata) -> None:
    jobs = Jobs(metadata, ttl_seconds=1000)
    await jobs.enqueue(TENANT, "ctx_01")
    before = await claimed(jobs, "w1")
    assert await jobs.void_owners() == 1
    assert await jobs.num_builders() == 0
    again = await claimed(jobs, "w2")
    assert (again.id, again.attempts) == (before.id, 2)
    assert await jobs.num_builders() == 1


async def test_a_refused_job_waits_its_time_from_when_nobody_was_left(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata, ttl_seconds=1000, retry_seconds=0, refused_seconds=600)
    await jobs.enqueue(TENANT, "ctx_01")
    job = await claimed(jobs, "w1")
    assert not await jobs.refuse(job)
    since = int(await redis.hget(refusals(job.id), "since"))
    # Seconds of the server's clock are whole, and go on meanwhile.
    await redis.hset(refusals(job.id), "since", since - 500)
    assert not await jobs.refuse(job)
    await redis.hset(refusals(job.id), "since", since - 600)
    assert await jobs.refuse(job)


async def test_a_builder_that_fell_silent_is_not_waited_for(metadata: Metadata) -> None:
    jobs = Jobs(metadata, ttl_seconds=0.05, heartbeat_seconds=0.01, refused_seconds=0)
    await jobs.enqueue(TENANT, "ctx_01")
    assert await jobs.claim("dead", 0) is not None
    job = await claimed(jobs, "w1", 30)
    assert await jobs.refuse(job)


async def test_many_workers_at_once_never_share_a_job(metadata: Metadata) -> None:
    jobs = Jobs(metadata)
    for number in range(30):
        await jobs.enqueue(TENANT, f"ctx_{number}")
    taken = await asyncio.gather(*(jobs.claim(f"w{number}", 0) for number in range(40)))
    ids = [job.id for job in taken if job]
    assert len(ids) == len(set(ids)) == 30


async def test_a_waiting_worker_gets_a_job_that_comes_later(metadata: Metadata) -> None:
    jobs = Jobs(metadata)
    waiting = asyncio.create_task(jobs.claim("w1", 30))
    await asyncio.sleep(0)
    await jobs.enqueue(TENANT, "ctx_01")
    job = await waiting
    assert job is not None
    assert (job.context_id, job.attempts, job.owner) == ("ctx_01", 1, "w1")


async def test_a_job_is_not_claimable_while_its_owner_is_heard_of(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata, ttl_seconds=1000)
    await jobs.enqueue(TENANT, "ctx_01")
    job = await claimed(jobs, "w1")
    await fall_silent(redis, job, for_ms=900_000)
    assert await jobs.claim("w2", 0) is None
    await jobs.heartbeat(job, "w1")
    (entry,) = await pending(redis)
    assert entry["time_since_delivered"] < 900_000
    assert entry["times_delivered"] == 1


async def test_field_53_the_job_of_a_dead_owner_goes_to_another_and_attempts_are_counted(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    await jobs.enqueue(TENANT, "ctx_01")
    await jobs.enqueue(TENANT, "ctx_02")
    job = await claimed(jobs, "w0")
    for attempt in range(2, MAX_ATTEMPTS + 3):
        await fall_silent(redis, job)
        # Before the newer job, or it would wait behind every new one.
        job = await claimed(jobs, f"w{attempt}")
        assert (job.context_id, job.attempts) == ("ctx_01", attempt)
    assert (await claimed(jobs, "w9")).context_id == "ctx_02"


async def test_a_waiting_worker_takes_over_a_job_that_falls_silent(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata, ttl_seconds=0.2, heartbeat_seconds=0.05)
    await jobs.enqueue(TENANT, "ctx_01")
    await claimed(jobs, "dead")
    job = await claimed(jobs, "w2", 30)
    assert (job.context_id, job.attempts, job.owner) == ("ctx_01", 2, "w2")


async def test_field_54_a_zombie_never_steals_its_job_back(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    await jobs.enqueue(TENANT, "ctx_01")
    zombie = await claimed(jobs, "w1")
    await fall_silent(redis, zombie)
    job = await claimed(jobs, "w2")
    with pytest.raises(LeaseLost, match="w1"):
        await jobs.heartbeat(zombie, "w1")
    assert not await jobs.ack(zombie)
    assert not await jobs.retry_later(zombie)
    (entry,) = await pending(redis)
    assert (entry["consumer"], entry["times_delivered"]) == ("w2", 2)
    await jobs.heartbeat(job, "w2")
    assert await jobs.ack(job)
    for late in (zombie, job):
        with pytest.raises(LeaseLost):
            await jobs.heartbeat(late, late.owner)


@pytest.mark.parametrize(("counted", "attempts"), [(True, 2), (False, 1)])
async def test_a_job_given_back_goes_to_another_and_may_count_or_not(
    metadata: Metadata, counted: bool, attempts: int
) -> None:
    jobs = Jobs(metadata, retry_seconds=0)
    await jobs.enqueue(TENANT, "ctx_01")
    job = await claimed(jobs, "w1")
    assert await jobs.retry_later(job, counted=counted)
    with pytest.raises(LeaseLost):
        await jobs.heartbeat(job, "w1")
    again = await claimed(jobs, "w2")
    assert (again.id, again.attempts) == (job.id, attempts)


async def test_a_job_given_back_is_not_tried_again_at_once(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata, ttl_seconds=7200, retry_seconds=3600)
    await jobs.enqueue(TENANT, "ctx_01")
    await jobs.retry_later(await claimed(jobs, "w1"))
    assert await jobs.claim("w2", 0) is None
    (entry,) = await pending(redis)
    assert entry["time_since_delivered"] >= 3_600_000


async def test_waiting_for_another_builder_never_uses_up_the_attempts(
    metadata: Metadata,
) -> None:
    jobs = Jobs(metadata, retry_seconds=0)
    await jobs.enqueue(TENANT, "ctx_01")
    for _ in range(MAX_ATTEMPTS + 3):
        job = await claimed(jobs, "w1")
        assert job.attempts == 1
        await jobs.retry_later(job, counted=False)


async def test_a_start_that_owns_the_directory_frees_every_job_and_keeps_the_counts(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    assert await jobs.void_owners() == 0
    for number in range(250):
        await jobs.enqueue(TENANT, f"ctx_{number:03}")
    taken = [await claimed(jobs, f"w{number % 3}") for number in range(240)]
    assert await jobs.void_owners() == 240
    again = [await claimed(jobs, "new") for _ in range(250)]
    assert [job.context_id for job in again] == [f"ctx_{number:03}" for number in range(250)]
    assert [job.attempts for job in again] == [2] * 240 + [1] * 10
    with pytest.raises(LeaseLost):
        await jobs.heartbeat(taken[0], taken[0].owner)


async def test_reconciling_enqueues_exactly_the_unfinished_without_a_job(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    for context_id, status in (
        ("ctx_lost", "queued"),
        ("ctx_rebuilding", "rebuilding"),
        ("ctx_building", "building"),
        ("ctx_waiting", "queued"),
        ("ctx_ready", "ready"),
        ("ctx_failed", "failed"),
    ):
        await metadata.create_context(a_context(context_id, status=status))
    await metadata.create_context(a_context("ctx_building", tenant="other"))
    await jobs.enqueue(TENANT, "ctx_building")
    await claimed(jobs, "w1")
    await jobs.enqueue(TENANT, "ctx_waiting")
    assert await jobs.reconcile(metadata) == 3
    assert await jobs.reconcile(metadata) == 0
    found = [await claimed(jobs, "w2") for _ in range(4)]
    assert {(job.tenant, job.context_id) for job in found} == {
        (TENANT, "ctx_waiting"),
        (TENANT, "ctx_lost"),
        (TENANT, "ctx_rebuilding"),
        ("other", "ctx_building"),
    }
    assert await jobs.claim("w2", 0) is None


async def test_field_55_a_flushed_queue_is_mended_by_the_reconciler(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    await metadata.create_context(a_context())
    await jobs.enqueue(TENANT, "ctx_01")
    job = await claimed(jobs, "w1")
    await redis.delete(BUILDS)
    with pytest.raises(LeaseLost):
        await jobs.heartbeat(job, "w1")
    assert not await jobs.ack(job)
    assert await jobs.reconcile(metadata) == 1
    assert (await claimed(jobs, "w2")).context_id == "ctx_01"


async def test_a_claimed_entry_that_was_removed_from_the_queue_is_passed_over(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    await jobs.enqueue(TENANT, "ctx_01")
    await jobs.enqueue(TENANT, "ctx_02")
    gone, left = await claimed(jobs, "w1"), await claimed(jobs, "w1")
    await fall_silent(redis, gone)
    await fall_silent(redis, left)
    await redis.xdel(BUILDS, gone.id)
    assert (await claimed(jobs, "w2")).context_id == "ctx_02"
    assert [entry["message_id"] for entry in await pending(redis)] == [left.id]


async def test_an_entry_that_is_no_job_is_reported_once_and_removed(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata)
    await redis.xadd(BUILDS, {"colour": "red"})
    await jobs.enqueue(TENANT, "ctx_01")
    with pytest.raises(RecordCorrupt, match="tenant"):
        await jobs.claim("w1", 0)
    assert (await claimed(jobs, "w1")).context_id == "ctx_01"
    assert await redis.xlen(BUILDS) == 1


async def test_workers_long_gone_are_forgotten_and_those_with_jobs_are_not(
    metadata: Metadata, redis: Redis
) -> None:
    jobs = Jobs(metadata, ttl_seconds=0.002, heartbeat_seconds=0.001)
    patient = Jobs(metadata)
    await jobs.enqueue(TENANT, "ctx_01")
    await claimed(patient, "busy")
    for number in range(5):
        assert await patient.claim(f"gone{number}", 0) is None
        await redis.xgroup_createconsumer(BUILDS, GROUP, f"gone{number}")
    async with asyncio.timeout(30):
        while len(await redis.xinfo_consumers(BUILDS, GROUP)) > 1:
            await jobs.reconcile(metadata)
    (consumer,) = await redis.xinfo_consumers(BUILDS, GROUP)
    assert (consumer["name"], consumer["pending"]) == ("busy", 1)


async def test_jobs_and_their_attempts_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path)
    store.start()
    metadata = await Metadata.connect(store.redis_url)
    jobs = Jobs(metadata)
    try:
        await jobs.enqueue(TENANT, "ctx_01")
        await jobs.enqueue(TENANT, "ctx_02")
        first = await claimed(jobs, "w1")
        await asyncio.to_thread(store.stop)
        await asyncio.to_thread(store.start)
        await jobs.heartbeat(first, "w1")
        assert await jobs.void_owners() == 1
        again = [await claimed(jobs, "w2") for _ in range(2)]
        assert [(job.context_id, job.attempts) for job in again] == [("ctx_01", 2), ("ctx_02", 1)]
    finally:
        await metadata.close()
        store.stop()


async def test_impossible_times_and_the_reserved_owner_are_refused(metadata: Metadata) -> None:
    with pytest.raises(Invalid, match="heartbeat"):
        Jobs(metadata, ttl_seconds=1, heartbeat_seconds=1)
    with pytest.raises(Invalid, match="owner"):
        await Jobs(metadata).claim("~nobody", 0)


async def test_a_queue_of_several_pages_is_reconciled_without_a_second_job(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep_storage.jobs._QUEUED_AT_ONCE", 3)
    jobs = Jobs(metadata)
    for number in range(10):
        await metadata.create_context(a_context(f"ctx_{number}"))
        if number != 7:
            await jobs.enqueue(TENANT, f"ctx_{number}")
    assert await jobs.reconcile(metadata) == 1
    assert await jobs.reconcile(metadata) == 0
