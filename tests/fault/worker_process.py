"""A process without torch that claims a build, keeps it alive, and commits when it is told.

Run as ``python -m tests.fault.worker_process REDIS_URL OBJECTS_DIRECTORY OWNER``. Says "building"
once it has job and lease; commits at the first line on its input, and says what came of it.
"""

import asyncio
import sys
from pathlib import Path

from kvkeep_storage.commit import commit
from kvkeep_storage.errors import StorageError
from kvkeep_storage.jobs import Job, Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import BuildLease

from ..support.stores import TENANT, Stores
from .commit_process import FACTS, ROWS

# Of every process on the queue: how long a dead one keeps the others waiting.
TTL_SECONDS = 1.0
HEARTBEAT_SECONDS = 0.1


def queue_and_leases(metadata: Metadata) -> tuple[Jobs, Leases]:
    """Those that every process of a test uses."""
    jobs = Jobs(metadata, ttl_seconds=TTL_SECONDS, heartbeat_seconds=HEARTBEAT_SECONDS)
    return jobs, Leases(metadata, ttl_seconds=TTL_SECONDS)


async def main(url: str, root: str, owner: str) -> None:
    """Work on one job, as a builder does."""
    metadata = await Metadata.connect(url)
    stores = await Stores.open(Path(root), metadata)
    jobs, leases = queue_and_leases(metadata)
    job = await jobs.claim(owner, 30)
    assert job is not None
    lease = await leases.acquire_build(TENANT, FACTS.fingerprint.digest, owner)
    assert lease is not None
    beating = asyncio.create_task(_beat(jobs, leases, job, lease))
    sys.stdout.write("building\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    beating.cancel()
    try:
        await commit(stores.objects, metadata, leases, lease, ROWS, FACTS)
        sys.stdout.write("committed" if await jobs.ack(job) else "committed, job lost")
    except StorageError as error:
        sys.stdout.write(error.code)
    await metadata.close()


async def _beat(jobs: Jobs, leases: Leases, job: Job, lease: BuildLease) -> None:
    while True:
        await leases.renew(lease)
        await jobs.heartbeat(job, job.owner)
        await asyncio.sleep(HEARTBEAT_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    if "torch" in sys.modules:
        sys.exit("storage imported torch")
