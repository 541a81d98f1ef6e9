"""Workers killed, and frozen for longer than their leases last, in mid-build."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvkeep_storage.commit import commit
from kvkeep_storage.jobs import Job

from ..support.caches import assert_equal_rows
from ..support.stores import TENANT, Stores
from .commit_process import FACTS, ROWS
from .worker_process import TTL_SECONDS, queue_and_leases

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

REPOSITORY = Path(__file__).parents[2]


@asynccontextmanager
async def building(
    stores: Stores, url: str, owner: str = "first"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker process that has claimed the job and holds the lease."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fault.worker_process", url, str(stores.root), owner),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"building\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def take_over(stores: Stores) -> Job:
    """Claim the job of a worker that fell silent, and commit its build."""
    jobs, leases = queue_and_leases(stores.metadata)
    job = await jobs.claim("second", 30)
    assert job is not None
    async with asyncio.timeout(30):
        # The lease was taken a moment after the job.
        while not (lease := await leases.acquire_build(TENANT, job_cache(), "second")):
            await jobs.heartbeat(job, "second")
    await commit(stores.objects, stores.metadata, leases, lease, ROWS, FACTS)
    assert await jobs.ack(job)
    return job


def job_cache() -> str:
    return FACTS.fingerprint.digest


async def register(stores: Stores) -> None:
    await stores.register(FACTS)
    await queue_and_leases(stores.metadata)[0].enqueue(TENANT, "ctx_01")


async def assert_answers(stores: Stores) -> None:
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    assert await stores.metadata.unfinished() == []


async def test_field_53_the_job_of_a_killed_worker_is_built_by_another_within_seconds(
    stores: Stores, valkey_url: str
) -> None:
    await register(stores)
    async with building(stores, valkey_url) as worker:
        jobs, _ = queue_and_leases(stores.metadata)
        # It lives, however long it takes: nobody gets its job.
        assert await jobs.claim("second", 2 * TTL_SECONDS) is None
        worker.kill()
        await worker.wait()
        job = await take_over(stores)
    assert job.attempts == 2
    await assert_answers(stores)


async def test_field_54_a_worker_frozen_past_its_lease_commits_nothing_when_it_wakes(
    stores: Stores, valkey_url: str
) -> None:
    await register(stores)
    async with building(stores, valkey_url) as zombie:
        zombie.send_signal(signal.SIGSTOP)
        await take_over(stores)
        live = await stores.metadata.live_generations(TENANT)
        zombie.send_signal(signal.SIGCONT)
        assert zombie.stdin is not None
        zombie.stdin.write(b"commit\n")
        assert zombie.stdout is not None
        assert await zombie.stdout.read() == b"lease_lost"
    assert await stores.metadata.live_generations(TENANT) == live
    await assert_answers(stores)
