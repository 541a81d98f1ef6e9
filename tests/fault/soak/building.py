"""Building synthetic caches the way the service does: claim, lease, beat, commit, settle."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvkeep_storage.documents import get_document, mirror_context
from kvkeep_storage.errors import LeaseLost, NotFound, StorageError, Unreferenced
from kvkeep_storage.jobs import MAX_ATTEMPTS, Job
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import BuildLease, ContextRecord

from .storage_calls import LEASE_SECONDS, Calls

GIVEN_UP = "build_failed"
NO_DOCUMENT = "document_corrupt"


async def work(calls: Calls, job: Job) -> None:
    """Settle a claimed job: its context ready, failed or gone, or the job given back."""
    jobs = calls.stores.jobs
    try:
        is_settled = await _attempt(calls, job)
    except Unreferenced:
        is_settled = True
    except LeaseLost:
        # The next holder settles it.
        return
    except StorageError:
        await jobs.retry_later(job)
        raise
    if is_settled:
        await jobs.ack(job)
    else:
        await jobs.retry_later(job, counted=False)


async def _attempt(calls: Calls, job: Job) -> bool:
    metadata, leases = calls.stores.metadata, calls.stores.leases
    record = await metadata.context(job.tenant, job.context_id)
    if record is None or not record.awaits_build:
        return True
    if await metadata.attach(job.tenant, job.context_id, time.time()) is not None:
        await _mirror(calls, job)
        return True
    lease = await leases.acquire_build(job.tenant, record.cache_id, job.owner)
    if lease is None:
        return False
    try:
        if job.attempts > MAX_ATTEMPTS:
            await _fail(calls, job, GIVEN_UP)
            return True
        async with _beating(calls, job, lease):
            return await _build(calls, job, record, lease)
    finally:
        with suppress(StorageError):
            await leases.release(lease)


async def _build(calls: Calls, job: Job, record: ContextRecord, lease: BuildLease) -> bool:
    stores = calls.stores
    try:
        body = await get_document(stores.objects, DocumentKey(job.tenant, job.context_id))
    except NotFound:
        if await stores.metadata.context(job.tenant, job.context_id) is not None:
            await _fail(calls, job, NO_DOCUMENT)
        return True
    if record.status != "ready":
        is_rebuild = record.status == "rebuilding"
        await stores.metadata.set_building(job.tenant, job.context_id, rebuilding=is_rebuild)
    committed = await stores.metadata.cache(job.tenant, record.cache_id)
    ratio = max(record.ratio, committed.ratio if committed else 0.0)
    await calls.commit(lease, body.text, ratio)
    return True


async def _fail(calls: Calls, job: Job, code: str) -> None:
    await calls.stores.metadata.fail_context(job.tenant, job.context_id, code, "in the soak")
    await _mirror(calls, job)


async def _mirror(calls: Calls, job: Job) -> None:
    key = DocumentKey(job.tenant, job.context_id)
    await mirror_context(calls.stores.objects, calls.stores.metadata, key)


@asynccontextmanager
async def _beating(calls: Calls, job: Job, lease: BuildLease) -> AsyncIterator[None]:
    async def beat() -> None:
        # What is lost ends the beats, and the commit, which is fenced, ends the build.
        with suppress(StorageError):
            while True:
                await calls.stores.leases.renew(lease)
                await calls.stores.jobs.heartbeat(job, job.owner)
                await asyncio.sleep(LEASE_SECONDS / 4)

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()
        await asyncio.wait([beats])
