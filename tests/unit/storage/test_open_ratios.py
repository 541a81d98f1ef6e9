"""Contexts whose ratio is still to be found: nothing but finding it makes them ready."""

import pytest

from kvkeep_storage.errors import Invalid, QuotaExceeded
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.quotas import Quotas
from kvkeep_storage.records import ContextRecord

from .samples import CACHE, TENANT, a_cache, a_context, stored
from .test_fidelity import MEASURED

pytestmark = pytest.mark.anyio
NOW = 1_790_000_500.75


def an_open_context(context_id: str = "ctx_open") -> ContextRecord:
    return a_context(context_id, ratio=1.0, ratio_from=0.15, max_loss=0.05)


async def commit(metadata: Metadata, ratios: tuple[float, ...] = (0.3, 1.0)) -> list[str]:
    lease = await Leases(metadata).acquire_build(TENANT, CACHE, "w1")
    assert lease is not None
    cache = a_cache(ratio=ratios[-1], ratios=ratios, fidelity=MEASURED)
    return await metadata.flip(cache, lease=lease, now=NOW)


async def test_a_record_with_an_open_ratio_reads_back_as_it_was(metadata: Metadata) -> None:
    await metadata.create_context(an_open_context())
    assert await stored(metadata, "ctx_open") == an_open_context()


def test_an_open_ratio_needs_the_loss_that_is_to_find_it() -> None:
    with pytest.raises(Invalid, match="max_loss"):
        a_context(ratio=1.0, ratio_from=0.15)


async def test_no_cache_is_taken_for_one_of_a_ratio_that_is_open(metadata: Metadata) -> None:
    await metadata.create_context(an_open_context())
    assert await commit(metadata) == []
    assert await metadata.attach(TENANT, "ctx_open", NOW) is None
    assert (await stored(metadata, "ctx_open")).status == "queued"


async def test_a_ratio_is_found_once_and_is_one_like_any_other_then(metadata: Metadata) -> None:
    await metadata.create_context(an_open_context())
    assert await metadata.find_ratio(TENANT, "ctx_open", 0.3)
    assert not await metadata.find_ratio(TENANT, "ctx_open", 0.5)
    assert not await metadata.find_ratio(TENANT, "ctx_missing", 0.5)
    found = await stored(metadata, "ctx_open")
    assert (found.ratio, found.ratio_from, found.max_loss) == (0.3, None, 0.05)
    assert await commit(metadata) == ["ctx_open"]
    ready = await stored(metadata, "ctx_open")
    assert (ready.status, ready.ratios_available) == ("ready", (0.3,))


async def test_an_open_ratio_is_charged_at_its_highest_until_it_is_found(
    metadata: Metadata,
) -> None:
    with pytest.raises(QuotaExceeded):
        await metadata.create_context(an_open_context(), Quotas(bytes=999_999))
    await metadata.create_context(an_open_context(), Quotas(bytes=1_000_000))
    assert (await metadata.usage(TENANT)).bytes == 1_000_000
    await metadata.find_ratio(TENANT, "ctx_open", 0.3)
    assert (await metadata.usage(TENANT)).bytes == 300_000


async def test_what_is_committed_at_the_highest_ratio_spares_no_quota(metadata: Metadata) -> None:
    await metadata.create_context(a_context("ctx_full", ratio=1.0))
    await commit(metadata)
    with pytest.raises(QuotaExceeded):
        await metadata.create_context(an_open_context(), Quotas(queued=0))


async def test_contexts_show_what_was_measured_of_their_cache(metadata: Metadata) -> None:
    await metadata.create_context(a_context("ctx_measured"))
    assert await commit(metadata) == ["ctx_measured"]
    assert (await stored(metadata, "ctx_measured")).fidelity == MEASURED
    assert (await metadata.cache(TENANT, CACHE)).fidelity == MEASURED
    await metadata.quarantine(TENANT, CACHE, "gen1")
    assert (await stored(metadata, "ctx_measured")).fidelity is None
