"""Stored caches that are damaged, lost or not ours: told to who asks, and never answered from."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import (
    ContextFailed,
    ContextModelMismatch,
    ContextNotReady,
    SessionGone,
)
from kvkeep_service.ports import CompressionSpec
from kvkeep_service.stores import Stores
from kvkeep_storage.errors import Incompatible, ObjectsUnavailable
from kvkeep_storage.manifest import SCHEMA_VERSION
from kvkeep_storage.redis_keys import TenantKeys
from kvkeep_storage.sweeper import Sweeper

from ...support.registering import breaking
from .serving import IDLE, Service, named, serving
from .tiny import LONG
from .workbench import TENANT

pytestmark = pytest.mark.anyio


@pytest.fixture
async def service(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    async with serving(stores, tiny) as started:
        yield started


@pytest.fixture
async def forgetful(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Service]:
    """Keeps nothing in memory: every answer comes from the store."""
    async with serving(stores, tiny, resident_bytes=0) as started:
        yield started


def damage(root: Path) -> None:
    """Flip one bit in the middle of the first slab of every cache."""
    for path in root.glob("caches/*/*/*/kv-00.safetensors"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def manifests(root: Path) -> list[Path]:
    return list(root.glob("caches/*/*/*/manifest.json"))


async def test_a_damaged_cache_is_told_to_all_who_ask_and_built_again_once(
    forgetful: Service, tmp_path: Path
) -> None:
    request = await forgetful.ready()
    before = await forgetful.ids(request)
    damage(tmp_path)
    asked = await asyncio.gather(
        *(forgetful.answer(request) for _ in range(3)), return_exceptions=True
    )
    assert [type(outcome) for outcome in asked] == [ContextNotReady] * 3
    assert (await forgetful.jobs.next_end()).how == "settled"
    assert await forgetful.status(request) == "ready"
    assert await forgetful.ids(request) == before
    assert len(manifests(tmp_path)) == 1
    assert forgetful.worker.stats() == IDLE


async def test_a_damaged_cache_in_memory_already_keeps_answering(
    service: Service, tmp_path: Path
) -> None:
    request = await service.ready()
    before = await service.ids(request)
    damage(tmp_path)
    assert await service.ids(request) == before


async def test_where_caches_are_not_rebuilt_a_damaged_one_fails_its_context(
    stores: Stores, tiny: LoadedModel, tmp_path: Path
) -> None:
    async with serving(stores, tiny, rebuilds=False, resident_bytes=0) as service:
        request = await service.ready()
        damage(tmp_path)
        with pytest.raises(ContextFailed) as told:
            await service.answer(request)
        assert told.value.facts["error_code"] == "cache_corrupt"
        assert await service.status(request) == "failed"


async def test_a_cache_whose_record_is_lost_is_built_again(forgetful: Service) -> None:
    request = await forgetful.ready()
    before = await forgetful.ids(request)
    link = forgetful.stores.metadata.link
    await link.command("DEL", TenantKeys(TENANT).cache(request.cache_id))
    with pytest.raises(ContextNotReady):
        await forgetful.answer(request)
    assert (await forgetful.jobs.next_end()).how == "settled"
    assert await forgetful.ids(request) == before


async def test_a_session_at_a_ratio_that_a_rebuild_has_not_is_gone_and_harms_nobody_else(
    forgetful: Service,
) -> None:
    low = await forgetful.ready(LONG, CompressionSpec(ratio=0.27))
    request = await forgetful.ready(LONG, CompressionSpec(ratio=0.55))
    await forgetful.answer(named(request, 1, ratio=0.27))
    await forgetful.registry.delete(TENANT, low.context_id)
    link = forgetful.stores.metadata.link
    await link.command("DEL", TenantKeys(TENANT).cache(request.cache_id))
    with pytest.raises(ContextNotReady):
        await forgetful.answer(request)
    assert (await forgetful.jobs.next_end()).how == "settled"
    before = await forgetful.ids(request)
    with pytest.raises(SessionGone) as told:
        await forgetful.answer(named(request, 2, session="ans_1"))
    assert told.value.facts["reason"] == "cache_replaced"
    # So goes who was let in with that ratio just before the rebuild.
    with pytest.raises(ContextNotReady):
        await forgetful.answer(replace(request, ratio=0.27))
    assert await forgetful.status(request) == "ready"
    assert await forgetful.ids(request) == before


async def test_an_outage_of_the_store_is_told_and_proves_nothing(
    stores: Stores, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep_storage.retries.ATTEMPTS", 1)
    async with serving(stores, tiny, resident_bytes=0) as service:
        request = await service.ready()
        before = await service.ids(request)
        whole = service.worker._stores
        away = ObjectsUnavailable("get", "away")
        service.worker._stores = breaking(whole, "objects", "read_ranges", away)
        with pytest.raises(ObjectsUnavailable):
            await service.answer(request)
        service.worker._stores = whole
        assert await service.status(request) == "ready"
        assert await service.ids(request) == before
        assert service.worker.stats() == IDLE


async def test_another_model_of_the_same_name_refuses_and_touches_nothing(
    stores: Stores, tiny: LoadedModel
) -> None:
    async with serving(stores, tiny) as first:
        request = await first.ready()
        before = await first.ids(request)
    changed = replace(tiny, info=replace(tiny.info, weights_digest="sha256:other"))
    async with serving(stores, changed) as second:
        with pytest.raises(ContextModelMismatch, match=r"weights_digest 'sha256:other'"):
            await second.answer(request)
        assert await second.status(request) == "ready"
    async with serving(stores, tiny) as third:
        assert await third.ids(request) == before


async def test_a_cache_of_a_newer_version_is_no_other_model_and_is_not_touched(
    forgetful: Service, tmp_path: Path
) -> None:
    request = await forgetful.ready()
    (path,) = manifests(tmp_path)
    newer = json.loads(path.read_bytes()) | {"schema_version": SCHEMA_VERSION + 1}
    content = json.dumps(newer).encode()
    path.write_bytes(content)
    await forgetful.stores.metadata.link.command(
        "HSET",
        TenantKeys(TENANT).cache(request.cache_id),
        "manifest_sha256",
        sha256(content).hexdigest(),
    )
    with pytest.raises(Incompatible) as told:
        await forgetful.answer(request)
    assert told.value.field == "schema_version"
    assert await forgetful.status(request) == "ready"
    assert path.exists()


@pytest.mark.parametrize("rebuilds", [True, False], ids=["rebuild", "fail"])
async def test_field_27_what_the_size_cap_took_is_built_again_when_it_is_asked(
    stores: Stores, tiny: LoadedModel, tmp_path: Path, *, rebuilds: bool
) -> None:
    """Nothing is damaged, so it is built again whatever is done about damage."""
    async with serving(stores, tiny, rebuilds=rebuilds, resident_bytes=0) as service:
        request = await service.ready()
        before = await service.ids(request)
        await service.ready(LONG)
        sweeper = Sweeper(stores.objects, stores.metadata, stores.leases, 3600, store_bytes=0)
        assert (await sweeper.run_once()).evicted == 1
        assert len(manifests(tmp_path)) == 1
        assert await service.status(request) == "ready"
        asked = await asyncio.gather(
            *(service.answer(request) for _ in range(3)), return_exceptions=True
        )
        assert [type(outcome) for outcome in asked] == [ContextNotReady] * 3
        assert (await service.jobs.next_end()).how == "settled"
        assert await service.ids(request) == before
        assert len(manifests(tmp_path)) == 2
