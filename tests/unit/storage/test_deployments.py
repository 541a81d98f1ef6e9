"""The same promises on one server, behind a sentinel and on a cluster, all of them real."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis
from redis.exceptions import ClusterCrossSlotError

from kvkeep_storage.errors import LeaseLost, MetadataUnavailable
from kvkeep_storage.jobs import Job, Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata, Replay, Started
from kvkeep_storage.quotas import Quotas, Usage
from kvkeep_storage.records import Expiry, Released
from kvkeep_storage.redis_keys import TenantKeys

from ...support.redis_servers import Cluster, Deployment, Sentinels, ValkeyProcess, running
from .samples import CACHE, TENANT, a_cache, a_context, stored

pytestmark = [pytest.mark.anyio, pytest.mark.redis]
KINDS = {"plain": ValkeyProcess, "sentinel": Sentinels, "cluster": Cluster}
# Their keys lie on all three nodes of the cluster.
TENANTS = (TENANT, "delta", "gamma", "third")


@pytest.fixture(scope="session", params=KINDS)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with running(KINDS[request.param](tmp_path_factory.mktemp(request.param))) as started:
        yield started


@pytest.fixture
async def metadata(deployment: Deployment) -> AsyncIterator[Metadata]:
    for server in servers(deployment):
        server.call("FLUSHALL")
    # Machines that are busy with other things connect slowly; nothing here waits for a time-out.
    connected = await Metadata.connect(deployment.url, timeout_seconds=10)
    try:
        yield connected
    finally:
        await connected.close()


def servers(deployment: Deployment) -> list[ValkeyProcess]:
    """Those that take writes."""
    match deployment:
        case Cluster():
            return deployment.nodes
        case Sentinels():
            return [deployment.primary]
        case _:
            return [deployment]


async def claimed(jobs: Jobs, owner: str, block_seconds: float = 0) -> Job:
    job = await jobs.claim(owner, block_seconds)
    assert job is not None
    return job


async def test_no_script_and_no_command_leaves_its_slot(metadata: Metadata) -> None:
    leases, jobs = Leases(metadata), Jobs(metadata, retry_seconds=0)
    for tenant in TENANTS:
        await metadata.create_context(a_context("ctx_01", tenant=tenant))
        await metadata.create_context(a_context("ctx_02", tenant=tenant))
        patched = await metadata.patch_context(
            tenant, "ctx_01", expires=Expiry("created_at", 10**9)
        )
        assert patched.expires_seconds == 10**9
        await metadata.patch_context(tenant, "ctx_01", name="one", expires=None)
        assert await metadata.touch_context(tenant, "ctx_01", 1_790_000_600.0)
        await metadata.set_building(tenant, "ctx_01", rebuilding=False)
        assert await metadata.progress(tenant, "ctx_01", "prefill", 0.5)
        lease = await leases.acquire_build(tenant, CACHE, "w1")
        assert lease is not None
        await leases.renew(lease)
        assert len(await metadata.flip(a_cache(tenant=tenant), lease=lease, now=1.0)) == 2
        assert len(await metadata.quarantine(tenant, CACHE, "gen1")) == 2
        assert await metadata.restore_cache(a_cache(tenant=tenant, generation="gen2"))
        assert await metadata.attach(tenant, "ctx_01", 2.0) is not None
        assert await metadata.fail_context(tenant, "ctx_02", "code", "detail")
        await leases.release(lease)
        listed = await metadata.contexts(tenant, limit=9, status="failed", metadata={})
        assert [record.id for record in listed.records] == ["ctx_02"]
        assert await metadata.evict(tenant, CACHE, "gen2") == "evicted"
        assert (await metadata.rebuild_context(tenant, "ctx_02", Quotas(1, 1, 10**6))).awaits_build
        assert await metadata.usage(tenant) == Usage(2, 1, 300_000)
        assert await metadata.restore_cache(a_cache(tenant=tenant, generation="gen2"))
        assert await metadata.recount(tenant) == a_cache().stored_bytes
        assert await metadata.context_ids(tenant) == ["ctx_01", "ctx_02"]
        async with leases.read_lease(tenant, CACHE):
            assert await leases.readers(tenant, CACHE) == 1
        assert await metadata.idempotency_begin(tenant, "key", "digest", 60) == Started()
        await metadata.idempotency_finish(tenant, "key", 200, b"body", {})
        replay = await metadata.idempotency_begin(tenant, "key", "digest", 60)
        assert replay == Replay(200, b"body", {})
        await jobs.enqueue(tenant, "ctx_01")
    assert await metadata.tenants() == sorted(TENANTS)
    assert len(await metadata.live_caches(TENANTS)) == len(TENANTS)
    for tenant in TENANTS:
        assert await metadata.live_generations(tenant) == {(CACHE, "gen2")}
        assert (await metadata.delete_context(tenant, "ctx_01")).existed
        assert await metadata.delete_context(tenant, "ctx_02") == Released(CACHE, "gen2")
        assert await jobs.ack(await claimed(jobs, "w1"))
    assert await metadata.unfinished() == []


@pytest.mark.parametrize("deployment", ["cluster"], indirect=True)
async def test_the_nodes_of_a_cluster_do_refuse_keys_of_several_slots(
    metadata: Metadata, deployment: Deployment
) -> None:
    assert isinstance(deployment, Cluster)
    nodes = {deployment.node_of(TenantKeys(tenant).contexts).url for tenant in TENANTS}
    assert len(nodes) == 3
    with Redis.from_url(nodes.pop()) as raw, pytest.raises(ClusterCrossSlotError):
        raw.mget("kvkeep:{a}:x", "kvkeep:{b}:x")


@pytest.mark.parametrize("deployment", ["cluster"], indirect=True)
async def test_a_slot_that_moves_to_another_node_is_followed(
    metadata: Metadata, deployment: Deployment
) -> None:
    assert isinstance(deployment, Cluster)
    key = TenantKeys(TENANT).contexts
    source = deployment.node_of(key)
    target = next(node for node in deployment.nodes if node is not source)
    assert await metadata.context(TENANT, "ctx_01") is None
    deployment.move_slot_of(key, source, target)
    try:
        await metadata.create_context(a_context())
        assert target.call("ZCARD", key) == 1
        assert (await stored(metadata, "ctx_01")).status == "queued"
    finally:
        target.call("FLUSHALL")
        deployment.move_slot_of(key, target, source)
    assert await metadata.context(TENANT, "ctx_01") is None


async def test_field_30_every_record_of_every_tenant_is_read_back(metadata: Metadata) -> None:
    ids = [f"ctx_{number:03}" for number in range(120)]
    for tenant in TENANTS:
        await asyncio.gather(
            *(metadata.create_context(a_context(item, tenant=tenant)) for item in ids)
        )
    assert len(await metadata.unfinished()) == len(TENANTS) * len(ids)
    page = await metadata.contexts("third", limit=110)
    assert [record.id for record in page.records] == ids[:110]
    assert page.has_more


async def test_a_lease_is_one_owner_s_and_all_are_voided_on_every_node(metadata: Metadata) -> None:
    leases = Leases(metadata)
    for tenant in TENANTS:
        first = await leases.acquire_build(tenant, CACHE, "w1")
        assert first is not None
        assert await leases.acquire_build(tenant, CACHE, "w2") is None
    await leases.void_all()
    for tenant in TENANTS:
        second = await leases.acquire_build(tenant, CACHE, "w2")
        assert second is not None
        assert second.fencing_token > 1


async def test_a_zombie_s_token_never_commits(metadata: Metadata) -> None:
    leases = Leases(metadata)
    await metadata.create_context(a_context())
    zombie = await leases.acquire_build(TENANT, CACHE, "w1", ttl=0.001)
    assert zombie is not None
    async with asyncio.timeout(30):
        while (lease := await leases.acquire_build(TENANT, CACHE, "w2")) is None:
            pass
    with pytest.raises(LeaseLost):
        await leases.renew(zombie)
    with pytest.raises(LeaseLost):
        await metadata.flip(a_cache(generation="theirs"), lease=zombie, now=1.0)
    assert await metadata.flip(a_cache(), lease=lease, now=2.0) == ["ctx_01"]
    with pytest.raises(LeaseLost):
        await metadata.flip(a_cache(generation="theirs"), lease=zombie, now=3.0)
    assert await metadata.live_generations(TENANT) == {(CACHE, "gen1")}


async def test_jobs_go_to_one_worker_each_and_a_zombie_does_not_get_its_own_back(
    metadata: Metadata,
) -> None:
    jobs = Jobs(metadata, ttl_seconds=0.4, heartbeat_seconds=0.1)
    waiting = [asyncio.create_task(jobs.claim(f"w{number}", 30)) for number in range(3)]
    await asyncio.sleep(0)
    for number in range(3):
        await jobs.enqueue(TENANT, f"ctx_{number}")
    taken = [job for job in await asyncio.gather(*waiting) if job is not None]
    assert sorted(job.context_id for job in taken) == ["ctx_0", "ctx_1", "ctx_2"]
    for job in taken[1:]:
        assert await jobs.ack(job)
    again = await claimed(jobs, "w9", 30)
    assert (again.context_id, again.attempts) == (taken[0].context_id, 2)
    with pytest.raises(LeaseLost):
        await jobs.heartbeat(taken[0], taken[0].owner)
    assert not await jobs.ack(taken[0])
    assert await jobs.ack(again)


async def test_a_queue_without_its_entries_is_mended(metadata: Metadata) -> None:
    jobs = Jobs(metadata)
    for tenant in TENANTS:
        await metadata.create_context(a_context(tenant=tenant))
    assert await jobs.reconcile(metadata) == len(TENANTS)
    assert await jobs.reconcile(metadata) == 0
    assert {(await claimed(jobs, "w1")).tenant for _ in TENANTS} == set(TENANTS)


async def test_more_calls_at_once_than_connections_all_succeed(metadata: Metadata) -> None:
    for tenant in TENANTS:
        await metadata.create_context(a_context(tenant=tenant))
    calls = [metadata.touch_context(tenant, "ctx_01", 1.0) for tenant in TENANTS * 60]
    assert all(await asyncio.gather(*calls))
    assert (await stored(metadata, "ctx_01")).queries == 60


async def test_a_cancelled_call_leaves_the_connections_usable(metadata: Metadata) -> None:
    await metadata.create_context(a_context(name="mine"))
    for steps in range(12):
        call = asyncio.create_task(metadata.contexts(TENANT, limit=10))
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert (await stored(metadata, "ctx_01")).name == "mine"


# Where a sentinel watches, the replica would be promoted: see the tests of that.
@pytest.mark.parametrize("deployment", ["plain", "cluster"], indirect=True)
async def test_a_silent_server_is_unavailable_and_found_again_when_it_wakes(
    metadata: Metadata, deployment: Deployment
) -> None:
    await metadata.create_context(a_context())
    silent = servers(deployment)
    if isinstance(deployment, Cluster):
        silent = [deployment.node_of(TenantKeys(TENANT).contexts)]
    impatient = await Metadata.connect(deployment.url, timeout_seconds=0.5)
    for server in silent:
        server.pause()
    try:
        async with asyncio.timeout(30):
            for _ in range(2):
                with pytest.raises(MetadataUnavailable):
                    await impatient.context(TENANT, "ctx_01")
    finally:
        for server in silent:
            server.resume()
    await until_it_answers(impatient)
    assert await impatient.context(TENANT, "ctx_01") == await stored(metadata, "ctx_01")
    await impatient.close()


# Where a sentinel watches, the replica would be promoted: see the tests of that.
@pytest.mark.parametrize("deployment", ["plain", "cluster"], indirect=True)
async def test_a_killed_server_comes_back_with_every_acknowledged_record(
    metadata: Metadata, deployment: Deployment
) -> None:
    for tenant in TENANTS:
        await metadata.create_context(a_context(tenant=tenant))
    for server in servers(deployment):
        server.kill()
    with pytest.raises(MetadataUnavailable):
        await metadata.context(TENANT, "ctx_01")
    for server in servers(deployment):
        server.start().until_it_answers()
    if isinstance(deployment, Cluster):
        deployment.until_whole()
    await until_it_answers(metadata)
    for tenant in TENANTS:
        assert (await stored(metadata, "ctx_01", tenant)).status == "queued"


async def until_it_answers(metadata: Metadata) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                for tenant in TENANTS:
                    await metadata.context(tenant, "ctx_01")
            except MetadataUnavailable:
                await asyncio.sleep(0.02)
            else:
                return
