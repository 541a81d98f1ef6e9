import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvkeep_service.config import load_settings
from kvkeep_service.stores import open_stores
from kvkeep_storage.errors import MetadataUnavailable
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.metadata import Metadata

from ..storage.samples import CACHE, TENANT, a_context

pytestmark = pytest.mark.anyio


async def pid_of(metadata: Metadata) -> int:
    """The process, once everything it has acknowledged is written to its file."""
    while True:
        infos = await metadata.link.infos()
        assert infos is not None
        if infos[0]["aof_buffer_length"] == "0":
            return int(infos[0]["process_id"])


async def pid_once_it_answers(metadata: Metadata) -> int:
    async with asyncio.timeout(60):
        while True:
            try:
                return await pid_of(metadata)
            except MetadataUnavailable:
                await asyncio.sleep(0.02)


async def test_a_valkey_killed_under_a_live_server_comes_back_with_records_leases_and_jobs(
    tmp_path: Path,
) -> None:
    async with open_stores(load_settings({"data": tmp_path})) as stores:
        metadata, jobs = stores.metadata, Jobs(stores.metadata, ttl_seconds=1000)
        await metadata.create_context(a_context())
        await jobs.enqueue(TENANT, "ctx_01")
        job = await jobs.claim("w1", 0)
        assert job is not None
        lease = await stores.leases.acquire_build(TENANT, CACHE, "w1", ttl=1000)
        assert lease is not None
        for _ in range(2):
            first = await pid_of(metadata)
            os.kill(first, signal.SIGKILL)
            assert await pid_once_it_answers(metadata) != first
            assert await metadata.context(TENANT, "ctx_01") is not None
            await stores.leases.renew(lease)
            await jobs.heartbeat(job, "w1")
        last = await pid_of(metadata)
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)
