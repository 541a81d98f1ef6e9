import pytest

from kvkeep_storage import standing
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.standing import Standing, standings

from .samples import CACHE, TENANT, a_cache, a_context

pytestmark = pytest.mark.anyio


async def test_records_say_which_generation_is_committed_and_whether_anybody_wants_it(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "_AT_ONCE", 2)
    await metadata.create_context(a_context("ctx_01"))
    lease = await Leases(metadata).acquire_build(TENANT, CACHE, "builder")
    assert lease is not None
    await metadata.flip(a_cache(), lease=lease, now=1.0)
    await metadata.create_context(a_context("ctx_02", cache_id="waiting"))
    await metadata.create_context(a_context("ctx_03", cache_id="elsewhere", tenant="other"))
    unknown = Standing(None, False)
    assert await standings(metadata, TENANT, [CACHE, "waiting", "unknown", "elsewhere"]) == {
        CACHE: Standing("gen1", True),
        "waiting": Standing(None, True),
        "unknown": unknown,
        "elsewhere": unknown,
    }
    await metadata.delete_context(TENANT, "ctx_01")
    assert await standings(metadata, TENANT, [CACHE]) == {CACHE: unknown}
    assert await standings(metadata, TENANT, []) == {}


async def test_a_quarantined_cache_is_wanted_and_has_no_generation(metadata: Metadata) -> None:
    await metadata.create_context(a_context("ctx_01"))
    lease = await Leases(metadata).acquire_build(TENANT, CACHE, "builder")
    assert lease is not None
    await metadata.flip(a_cache(), lease=lease, now=1.0)
    await metadata.quarantine(TENANT, CACHE, "gen1")
    assert await standings(metadata, TENANT, [CACHE]) == {CACHE: Standing(None, True)}
