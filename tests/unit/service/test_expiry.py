"""Expiry beside everything else that goes on, from admission to the last byte."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import ContextExpired, ContextNotFound
from kvkeep_service.registry import Changes
from kvkeep_service.stores import Stores
from kvkeep_storage.metadata import UNSET
from kvkeep_storage.records import Expiry
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.reindex import reindex
from kvkeep_storage.sweeper import Sweeper

from ...support.stores import entries_below
from .serving import IDLE, Service, serving
from .workbench import TENANT

pytestmark = pytest.mark.anyio

FOR_A_MINUTE = Changes(UNSET, UNSET, Expiry("created_at", 60))
FOR_EVER = Changes(UNSET, UNSET, None)


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


async def _pass_time(stores: Stores, context_id: str) -> None:
    """Let a minute pass for one context."""
    keys, past = TenantKeys(TENANT), time.time() - 60
    await stores.metadata.link.command("HSET", keys.context(context_id), "expires_at", past)
    await stores.metadata.link.command("ZADD", keys.expiry, past, context_id)


async def _sweep(service: Service) -> int:
    stores = service.stores
    report = await Sweeper(stores.objects, stores.metadata, stores.leases, 0).run_once()
    for tenant, cache_id in report.unreferenced:
        await service.worker.drop(tenant, cache_id)
    return report.expired


async def test_a_question_that_was_admitted_is_answered_though_its_context_expires(
    service: Service, tmp_path: Path
) -> None:
    request = await service.ready()
    before = await service.ids(request)
    await service.registry.change(TENANT, request.context_id, FOR_A_MINUTE)
    service.model.hold_after(2)
    asked = asyncio.create_task(service.ids(request))
    await asyncio.to_thread(service.model.wait_until_held)
    await _pass_time(service.stores, request.context_id)
    with pytest.raises(ContextExpired):
        await service.registry.open_query(TENANT, request.context_id, None)
    assert await _sweep(service) == 1
    assert entries_below(tmp_path) == ["store.json"]
    service.model.release()
    assert await asked == before
    with pytest.raises(ContextNotFound):
        await service.registry.open_query(TENANT, request.context_id, None)
    stats = service.worker.stats()
    assert (stats.running_queries, stats.pinned_caches) == (0, 0)
    assert (stats.resident_caches, stats.resident_bytes) == (IDLE.resident_caches, 0)
    assert await service.stores.metadata.usage(TENANT) == await service.stores.metadata.usage("x")


async def test_a_context_that_is_to_stay_for_ever_outlives_its_old_expiry(
    service: Service,
) -> None:
    request = await service.ready()
    before = await service.ids(request)
    await service.registry.change(TENANT, request.context_id, FOR_A_MINUTE)
    await service.registry.change(TENANT, request.context_id, FOR_EVER)
    # What a sweeper would have gone by is gone too, in the mirror as in the record.
    assert await service.stores.metadata.expired(time.time() + 10**6, 10) == []
    assert await _sweep(service) == 0
    assert await service.ids(request) == before
    await service.stores.metadata.link.command("FLUSHALL")
    await reindex(service.stores.objects, service.stores.metadata)
    record = await service.registry.context(TENANT, request.context_id)
    assert (record.expires_at, record.expires_anchor) == (None, None)


async def test_an_expired_context_cannot_be_built_again(service: Service) -> None:
    request = await service.ready()
    await service.registry.change(TENANT, request.context_id, FOR_A_MINUTE)
    await _pass_time(service.stores, request.context_id)
    with pytest.raises(ContextExpired):
        await service.registry.rebuild(TENANT, request.context_id)
    assert await service.stores.metadata.unfinished() == []
