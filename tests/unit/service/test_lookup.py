"""Asking while a real Valkey is killed, silent, flushed, full or back again."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep_service.errors import ContextExpired, ContextNotFound, RecordsForeign
from kvkeep_service.ids import new_context_id
from kvkeep_service.lookup import Lookup
from kvkeep_service.registry import Changes, Filter, Registry
from kvkeep_service.stores import Stores
from kvkeep_storage.binding import bind_if_new
from kvkeep_storage.errors import MetadataUnavailable
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import UNSET, Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import Expiry

from ...support.redis_servers import ValkeyProcess, running
from ...support.registering import WANTED, built
from ...support.scripted_worker import ScriptedWorker
from ...support.stores import files_below

pytestmark = [pytest.mark.anyio, pytest.mark.redis]
TENANT = "default"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with running(ValkeyProcess(tmp_path_factory.mktemp("valkey"))) as server:
        yield server


@pytest.fixture
async def stores(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[Stores]:
    valkey.call("FLUSHALL")
    metadata = await Metadata.connect(valkey.url, timeout_seconds=1)
    objects = Objects.open(tmp_path.as_uri())
    await bind_if_new(objects, metadata)
    yield Stores(metadata, objects, Leases(metadata), Jobs(metadata))
    await metadata.close()


async def asked(registry: Registry, context_id: str) -> str:
    return (await registry.open_query(TENANT, context_id, None)).cache_id


async def test_a_context_seen_within_the_window_answers_while_redis_is_dead_and_nothing_else_does(
    registry: Registry, worker: ScriptedWorker, stores: Stores, valkey: ValkeyProcess
) -> None:
    seen, unseen = await built(registry, worker), await built(Registry(stores, worker), worker)
    cache_id = await asked(registry, seen)
    valkey.kill()
    try:
        assert await asked(registry, seen) == cache_id
        await registry.until_askable(TENANT, seen, 5.0)
        with pytest.raises(MetadataUnavailable):
            await asked(registry, unseen)
        with pytest.raises(MetadataUnavailable):
            await registry.open_query("other", seen, None)
        with pytest.raises(MetadataUnavailable):
            await registry.context(TENANT, seen)
        with pytest.raises(MetadataUnavailable):
            await registry.contexts(TENANT, Filter())
        with pytest.raises(MetadataUnavailable):
            await registry.register(TENANT, WANTED)
        with pytest.raises(MetadataUnavailable):
            await registry.change(TENANT, seen, Changes("name", UNSET, UNSET))
    finally:
        valkey.start().until_it_answers()
    record = await registry.context(TENANT, seen)
    assert (record.status, record.queries) == ("ready", 1)


async def test_a_redis_that_hangs_costs_a_time_out_and_then_not_one_each_time(
    registry: Registry, worker: ScriptedWorker, valkey: ValkeyProcess
) -> None:
    context_id = await built(registry, worker)
    cache_id = await asked(registry, context_id)
    valkey.pause()
    try:
        async with asyncio.timeout(30):
            for _ in range(200):
                assert await asked(registry, context_id) == cache_id
    finally:
        valkey.resume()


async def test_a_registration_that_redis_hung_on_is_no_context_when_it_wakes(
    registry: Registry, stores: Stores, valkey: ValkeyProcess, tmp_path: Path
) -> None:
    valkey.pause()
    try:
        async with asyncio.timeout(30):
            with pytest.raises(MetadataUnavailable):
                await registry.register(TENANT, WANTED)
    finally:
        valkey.resume()
    valkey.until_it_answers()
    assert (await registry.contexts(TENANT, Filter())).records == ()
    assert await stores.metadata.unfinished() == []
    assert files_below(tmp_path) == ["store.json"]


async def test_the_window_ends(
    stores: Stores, worker: ScriptedWorker, valkey: ValkeyProcess
) -> None:
    now = 1000.0
    lookup = Lookup(stores, 60.0, lambda: now)
    registry = Registry(stores, worker)
    context_id = await built(registry, worker)
    assert (await lookup.answerable(TENANT, context_id)) is not None
    valkey.kill()
    try:
        now += 59.9
        found = await lookup.answerable(TENANT, context_id)
        assert found is not None
        assert not found.is_current
        now += 0.2
        with pytest.raises(MetadataUnavailable):
            await lookup.answerable(TENANT, context_id)
    finally:
        valkey.start().until_it_answers()


async def test_what_was_deleted_here_is_not_revived(
    registry: Registry, worker: ScriptedWorker, valkey: ValkeyProcess
) -> None:
    deleted, half_deleted = await built(registry, worker), await built(registry, worker)
    for context_id in (deleted, half_deleted):
        await asked(registry, context_id)
    await registry.delete(TENANT, deleted)
    valkey.kill()
    try:
        with pytest.raises(MetadataUnavailable):
            await registry.delete(TENANT, half_deleted)
        for context_id in (deleted, half_deleted):
            with pytest.raises(MetadataUnavailable):
                await asked(registry, context_id)
    finally:
        valkey.start().until_it_answers()


async def test_what_expires_meanwhile_stops_answering(
    stores: Stores, worker: ScriptedWorker, valkey: ValkeyProcess
) -> None:
    now = 1_790_000_000.0
    registry = Registry(stores, worker, clock=lambda: now)
    wanted = replace(WANTED, expires=Expiry("created_at", 10**9))
    context_id = await built(registry, worker, wanted)
    await asked(registry, context_id)
    valkey.kill()
    try:
        await asked(registry, context_id)
        now += 10**9
        with pytest.raises(ContextExpired):
            await asked(registry, context_id)
    finally:
        valkey.start().until_it_answers()


async def test_a_flushed_redis_is_no_reason_to_say_that_there_is_no_such_context(
    registry: Registry, worker: ScriptedWorker, valkey: ValkeyProcess, stores: Stores
) -> None:
    context_id, unknown = await built(registry, worker), new_context_id()
    with pytest.raises(ContextNotFound):
        await registry.context(TENANT, unknown)
    valkey.call("FLUSHALL")
    for missed in (context_id, unknown):
        with pytest.raises(RecordsForeign, match="reindex") as told:
            await registry.context(TENANT, missed)
        with pytest.raises(RecordsForeign):
            await registry.open_query(TENANT, missed, None)
        with pytest.raises(RecordsForeign):
            await registry.change(TENANT, missed, Changes("name", UNSET, UNSET))
    for _ in range(2):
        with pytest.raises(RecordsForeign):
            await registry.contexts(TENANT, Filter())
        # A list that shows what came since, and nothing else, is no better than an empty one.
        await registry.register(TENANT, WANTED)
    assert (told.value.code, told.value.retryable) == ("metadata_unavailable", True)
    assert (await registry.health())["store"] == "degraded"
    await stores.metadata.bind_store("another")
    with pytest.raises(RecordsForeign):
        await registry.context(TENANT, unknown)
    await stores.metadata.bind_store(str(await stores.objects.find_store_id()))
    with pytest.raises(ContextNotFound):
        await registry.context(TENANT, unknown)
    assert len((await registry.contexts(TENANT, Filter())).records) == 2


async def test_a_redis_that_reads_and_refuses_writes_answers_and_is_not_called_healthy(
    registry: Registry, worker: ScriptedWorker, valkey: ValkeyProcess
) -> None:
    context_id = await built(registry, worker)
    assert (await registry.health())["metadata"] == "ok"
    valkey.call("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        await asked(registry, context_id)
        health = await registry.health()
        assert (health["metadata"], health["store"]) == ("degraded", "ok")
        with pytest.raises(MetadataUnavailable):
            await registry.register(TENANT, WANTED)
    finally:
        valkey.call("CONFIG", "SET", "min-replicas-to-write", 0)
    assert (await registry.health())["metadata"] == "ok"


async def test_a_dead_redis_is_said_by_health(registry: Registry, valkey: ValkeyProcess) -> None:
    valkey.kill()
    try:
        assert (await registry.health())["metadata"] == "unavailable"
    finally:
        valkey.start().until_it_answers()
    assert (await registry.health())["metadata"] == "ok"
