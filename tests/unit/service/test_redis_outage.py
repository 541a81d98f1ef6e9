"""Redis killed, restarted, flushed and failed over in mid-build and in mid-query."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import RecordsForeign
from kvkeep_service.ports import AnswerEvent, QueryRequest
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.errors import MetadataUnavailable
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.redis_keys import BUILDS, TenantKeys
from kvkeep_storage.reindex import reindex

from ...support.redis_servers import Sentinels, ValkeyProcess, running
from .serving import Service, serving
from .tiny import LONG
from .workbench import TENANT, Workbench, generations, workbench

pytestmark = [pytest.mark.anyio, pytest.mark.redis]
# Longer than anything here takes: a lease ends when a test says so.
LEASE_SECONDS = 60.0


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with running(ValkeyProcess(tmp_path_factory.mktemp("valkey"))) as server:
        yield server


@pytest.fixture
async def stores(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[Stores]:
    valkey.call("FLUSHALL")
    async with opened(valkey.url, tmp_path) as stores:
        yield stores


@asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[Stores]:
    metadata = await Metadata.connect(url, timeout_seconds=1)
    objects = Objects.open((folder / "objects").as_uri())
    await bind_if_new(objects, metadata)
    leases = Leases(metadata, ttl_seconds=LEASE_SECONDS)
    try:
        yield Stores(metadata, objects, leases, Jobs(metadata))
    finally:
        await metadata.close()


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


async def until_it_answers(metadata: Metadata) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await metadata.probe_writes()
            except MetadataUnavailable:
                await asyncio.sleep(0.01)
            else:
                return


async def assert_ready_once(bench: Workbench, context_id: str, folder: Path) -> None:
    """It is ready, by one generation, which holds what a build gives."""
    record = await bench.record(context_id)
    assert record.status == "ready"
    ((_, generation),) = await bench.stores.metadata.live_generations(TENANT)
    (manifest,) = generations(folder / "objects")
    assert generation in manifest
    loaded = await bench.load(record, record.ratio)
    assert loaded.manifest.fingerprint.digest == record.cache_id


# --- in mid-build ------------------------------------------------------------------------------


async def test_a_redis_restarted_in_mid_build_is_not_noticed_by_the_build(
    bench: Workbench, valkey: ValkeyProcess, tmp_path: Path
) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    valkey.kill()
    valkey.start().until_it_answers()
    bench.model.release()
    end = await bench.jobs.next_end()
    assert (end.how, end.attempts) == ("settled", 1)
    await assert_ready_once(bench, record.id, tmp_path)


async def test_a_build_that_outlasts_its_lease_returns_to_the_queue_and_ends_once(
    bench: Workbench, valkey: ValkeyProcess, tmp_path: Path
) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    valkey.kill()
    # Built while Redis is away: it cannot be committed.
    bench.model.release()
    async with asyncio.timeout(60):
        # Neither its job nor its lease can be given back, so nothing tells of its end.
        while bench.builder.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    valkey.start().until_it_answers()
    valkey.call("DEL", TenantKeys(TENANT).build_lease(record.cache_id))
    await bench.until_settled()
    await assert_ready_once(bench, record.id, tmp_path)
    assert await bench.stores.metadata.unfinished() == []


async def test_a_stop_while_redis_hangs_ends_and_another_takes_the_build_up(
    bench: Workbench, valkey: ValkeyProcess, tmp_path: Path
) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    valkey.pause()
    try:
        async with asyncio.timeout(30):
            await bench.builder.stop()
    finally:
        valkey.resume()
    bench.model.release()
    await until_it_answers(bench.stores.metadata)
    # What could not be given back runs out by itself.
    valkey.call("DEL", TenantKeys(TENANT).build_lease(record.cache_id))
    await bench.jobs.void_owners()
    another = bench.another()
    another.start()
    await bench.until_settled()
    await assert_ready_once(bench, record.id, tmp_path)
    await another.stop()


async def test_a_redis_flushed_in_mid_build_ends_it_and_a_reindex_brings_it_back(
    bench: Workbench, valkey: ValkeyProcess, tmp_path: Path
) -> None:
    record = await bench.register(LONG)
    bench.model.hold_after(1)
    bench.builder.start()
    await bench.held()
    valkey.call("FLUSHALL")
    await bench.jobs.next_end()
    bench.model.release()
    assert generations(tmp_path / "objects") == []
    with pytest.raises(RecordsForeign):
        await bench.registry.context(TENANT, record.id)
    report = await reindex(bench.stores.objects, bench.stores.metadata)
    assert (report.contexts, report.damaged) == (1, ())
    assert await bench.jobs.reconcile(bench.stores.metadata) == 1
    await bench.until_settled()
    await assert_ready_once(bench, record.id, tmp_path)


@pytest.mark.parametrize("is_lost", [False, True], ids=["replicated", "not yet replicated"])
async def test_field_30_a_failover_in_mid_build_commits_it_once(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr("kvkeep_service.heartbeat._PROGRESS_SECONDS", 0.001)
    monkeypatch.setattr("kvkeep_service.builder._RETRY_SECONDS", 0)
    with running(Sentinels(tmp_path / "redis")) as redis:
        async with opened(redis.url, tmp_path) as stores, workbench(stores, tiny) as bench:
            record = await bench.register(LONG)
            bench.model.hold_after(1)
            bench.builder.start()
            await bench.held()
            lease = TenantKeys(TENANT).build_lease(record.cache_id)
            redis.primary.call("WAIT", 1, 10_000)
            await asyncio.to_thread(redis.promote)
            if is_lost:
                # What the primary had taken and not passed on: the lease, the token, the claim.
                redis.replica.call("DEL", lease, TenantKeys(TENANT).fence)
                queue = (BUILDS, "builders")
                redis.replica.call("XGROUP", "DELCONSUMER", *queue, "builder")
                redis.replica.call("XGROUP", "SETID", *queue, "0")
            await until_it_answers(stores.metadata)
            bench.model.release()
            await bench.until_settled()
            await assert_ready_once(bench, record.id, tmp_path)


# --- in mid-query ------------------------------------------------------------------------------


async def answering(service: Service, request: QueryRequest) -> tuple[int, ...] | None:
    """One question by way of the registry, as the API asks it."""
    askable = await service.registry.open_query(TENANT, request.context_id, None)
    assert askable.cache_id == request.cache_id
    return (await service.answer(request)).token_ids


async def test_a_query_in_flight_and_those_after_it_outlive_redis(
    service: Service, valkey: ValkeyProcess
) -> None:
    request = await service.ready()
    expected = await answering(service, request)
    service.model.hold_after(2)
    async with aclosing(service.worker.query(request)) as events:
        first = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(service.model.wait_until_held)
        valkey.kill()
        try:
            service.model.release()
            await first
            ends = [event async for event in events if isinstance(event, AnswerEvent)]
            assert [end.token_ids for end in ends] == [expected]
            assert service.worker.stats().pinned_caches == 0
            assert await answering(service, request) == expected
            health = await service.registry.health()
            assert (health["metadata"], health["worker"]) == ("unavailable", "ok")
        finally:
            valkey.start().until_it_answers()
    assert await answering(service, request) == expected
    assert (await service.registry.health())["metadata"] == "ok"


async def test_a_cache_that_is_not_in_memory_waits_for_redis_and_is_left_alone(
    service: Service, valkey: ValkeyProcess
) -> None:
    request = await service.ready()
    expected = await answering(service, request)
    await service.worker.drop(*CacheKey(TENANT, request.cache_id))
    valkey.pause()
    try:
        async with asyncio.timeout(15):
            with pytest.raises(MetadataUnavailable):
                await answering(service, request)
    finally:
        valkey.resume()
    await until_it_answers(service.stores.metadata)
    assert await service.status(request) == "ready"
    assert await answering(service, request) == expected


async def test_a_redis_flushed_in_mid_query_lets_it_end_and_a_reindex_brings_the_rest_back(
    service: Service, valkey: ValkeyProcess
) -> None:
    request = await service.ready()
    expected = await answering(service, request)
    service.model.hold_after(2)
    async with aclosing(service.worker.query(request)) as events:
        first = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(service.model.wait_until_held)
        valkey.call("FLUSHALL")
        service.model.release()
        await first
        ends = [event async for event in events if isinstance(event, AnswerEvent)]
    assert [end.token_ids for end in ends] == [expected]
    with pytest.raises(RecordsForeign):
        await answering(service, request)
    await reindex(service.stores.objects, service.stores.metadata)
    assert await answering(service, request) == expected
    assert (await service.registry.health())["store"] == "ok"
