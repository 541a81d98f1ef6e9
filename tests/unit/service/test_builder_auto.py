"""Contexts that name a loss instead of a ratio, from registration to a cache of the ratio found."""

from collections.abc import AsyncIterator

import pytest

from kvkeep_service.api.views import ContextView
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.ports import CompressionSpec, DocumentSpec
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import get_mirror
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.reindex import reindex

from ...support.documents import contract
from .workbench import TENANT, Workbench, workbench

pytestmark = pytest.mark.anyio
# About 1,500 tokens: long enough to be measured.
TEXT = DocumentSpec(contract("Charter of a ship", 55))


def auto(max_loss: float, **options: object) -> CompressionSpec:
    return CompressionSpec(ratio=1.0, max_loss=max_loss, **options)


@pytest.fixture
async def bench(stores: Stores, tiny: LoadedModel) -> AsyncIterator[Workbench]:
    async with workbench(stores, tiny) as opened:
        opened.builder.start()
        yield opened


async def test_a_build_finds_the_ratio_and_stores_no_more(bench: Workbench) -> None:
    registered = await bench.register(TEXT, auto(100.0))
    assert ContextView.of(registered).compression.ratio is None
    await bench.until_settled()
    record = await bench.record(registered.id)
    assert (record.status, record.ratio, record.ratio_from) == ("ready", 0.15, None)
    assert record.ratios_available == (0.05, 0.1, 0.15)
    shown = ContextView.of(record)
    assert (shown.compression.ratio, shown.compression.max_loss) == (0.15, 100.0)
    assert shown.fidelity is not None
    assert shown.fidelity.ratios[-1].ratio == 0.15
    assert shown.fidelity.nll_kept == shown.fidelity.ratios[-1].nll_kept
    assert (await bench.load(record, None)).manifest.ratios[-1] == 0.15


async def test_where_no_less_will_do_everything_stays(bench: Workbench) -> None:
    record = await bench.build(TEXT, auto(0.0))
    assert (record.status, record.ratio) == ("ready", 1.0)


async def test_what_was_measured_before_makes_the_next_one_ready_at_once(
    bench: Workbench,
) -> None:
    first = await bench.build(TEXT, auto(100.0))
    second = await bench.register(TEXT, auto(100.0))
    assert (second.status, second.ratio, second.cache_id) == ("ready", 0.15, first.cache_id)


async def test_what_a_fixed_ratio_left_open_is_built(bench: Workbench) -> None:
    fixed = await bench.build(TEXT, CompressionSpec(ratio=0.3))
    record = await bench.build(TEXT, auto(0.0))
    assert (record.cache_id, record.ratio) == (fixed.cache_id, 1.0)
    cache = await bench.stores.metadata.cache(TENANT, record.cache_id)
    assert cache is not None
    # Of both builds.
    assert cache.fidelity is not None
    assert cache.fidelity.at(0.3) is not None
    assert (await bench.record(fixed.id)).status == "ready"


async def test_what_cannot_be_reached_fails_with_its_own_code(bench: Workbench) -> None:
    record = await bench.build(TEXT, auto(0.0, quantization="int4"))
    assert (record.status, record.error_code) == ("failed", "max_loss_unreachable")
    assert "nats per token" in (record.error_detail or "")


async def test_a_ratio_that_was_found_survives_the_loss_of_redis(bench: Workbench) -> None:
    record = await bench.build(TEXT, auto(100.0))
    stores = bench.stores
    mirror = await get_mirror(stores.objects, DocumentKey(TENANT, record.id))
    assert (mirror.record.ratio, mirror.record.ratio_from) == (0.15, None)
    await stores.metadata.link.command("FLUSHALL")
    await reindex(stores.objects, stores.metadata)
    restored = await bench.record(record.id)
    assert (restored.status, restored.ratio) == ("ready", 0.15)
    assert restored.fidelity == record.fidelity
    assert restored.max_loss == 100.0
