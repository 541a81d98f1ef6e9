import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest

from kvkeep_storage.artifact import CacheDtype
from kvkeep_storage.errors import (
    Corrupt,
    Incompatible,
    Invalid,
    NotFound,
)
from kvkeep_storage.fingerprint import ModelIdentity
from kvkeep_storage.load import load
from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.sources import ObjectSource

from ...support.caches import RATIOS, assert_equal_rows, facts_for, prefix_of, random_rows
from ...support.stores import TENANT, Stores

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("retries_do_not_wait")]

ROWS = random_rows()
FACTS = facts_for(ROWS)


async def _committed(stores: Stores) -> CacheRecord:
    await stores.register(FACTS)
    return await stores.build(ROWS, FACTS)


def _with(stores: Stores, objects_like: type[Objects]) -> Any:
    stores.objects = objects_like.open(f"file://{stores.root}")
    return stores.objects


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bands", [1, 2, 3])
async def test_a_load_gives_every_heads_exact_prefix(
    stores: Stores, dtype: CacheDtype, bands: int
) -> None:
    rows = random_rows(dtype=dtype, num_layers=11, rows_max=9)
    facts = facts_for(rows)
    await stores.register(facts)
    await stores.build(rows, facts)
    loaded = await stores.load(facts, RATIOS[bands - 1])
    assert_equal_rows(loaded.rows, prefix_of(rows, bands))
    assert loaded.manifest.counts_array().shape == rows.counts.shape
    assert loaded.cache == await stores.metadata.cache(TENANT, facts.fingerprint.digest)


async def test_no_ratio_means_all_of_it(stores: Stores) -> None:
    await _committed(stores)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


@pytest.mark.parametrize("ratio", [0.07, 0.4])
async def test_a_ratio_that_the_cache_is_not_cut_at_is_refused(
    stores: Stores, ratio: float
) -> None:
    await _committed(stores)
    with pytest.raises(Invalid, match="ratio"):
        await stores.load(FACTS, ratio)


async def test_a_lower_ratio_reads_no_byte_of_the_slabs_above_it(stores: Stores) -> None:
    cache = await _committed(stores)
    for band in (1, 2):
        (stores.folder(cache) / f"kv-{band:02d}.safetensors").unlink()
    assert_equal_rows((await stores.load(FACTS, 0.05)).rows, prefix_of(ROWS, 1))


async def test_loads_of_many_caches_at_once_do_not_mix(stores: Stores) -> None:
    kinds = []
    for seed in range(6):
        rows = random_rows(seed)
        facts = facts_for(rows, token_ids_digest=str(seed))
        await stores.register(facts, f"ctx_{seed}")
        await stores.build(rows, facts)
        kinds.append((rows, facts))
    for _ in range(2):
        loaded = await asyncio.gather(*(stores.load(facts) for _, facts in kinds))
        for (rows, _), found in zip(kinds, loaded, strict=True):
            assert_equal_rows(found.rows, rows)


async def test_nothing_committed_is_not_found(stores: Stores) -> None:
    with pytest.raises(NotFound):
        await stores.load(FACTS)
    await stores.register(FACTS)
    with pytest.raises(NotFound):
        await stores.load(FACTS)


async def test_another_tenant_cannot_load_it(stores: Stores) -> None:
    await _committed(stores)
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)
    with pytest.raises(NotFound):
        await stores.load(FACTS, tenant="other")


@pytest.mark.parametrize("name", [item.name for item in fields(ModelIdentity)])
async def test_field_10_a_cache_of_another_model_is_refused_and_kept(
    stores: Stores, name: str
) -> None:
    cache = await _committed(stores)
    found = getattr(FACTS.fingerprint.model_identity, name)
    other = replace(
        FACTS.fingerprint.model_identity, **{name: found + (1 if isinstance(found, int) else "x")}
    )
    with pytest.raises(Incompatible, match=name):
        await load(
            ObjectSource(stores.objects),
            stores.objects,
            stores.metadata,
            stores.leases,
            TENANT,
            cache.cache_id,
            expected=other,
            ratio=None,
        )
    assert_equal_rows((await stores.load(FACTS)).rows, ROWS)


class _ActsOnce(Objects):
    """Does something once, before the first slab is read."""

    act: Any = None

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        if self.act is not None:
            act, self.act = self.act, None
            await act()
        await super().read_ranges(key, start, into, on_filled)


async def test_field_02_a_generation_replaced_during_the_load_gives_the_new_one_whole(
    stores: Stores,
) -> None:
    old = await _committed(stores)
    rebuilt = random_rows(5, counts=ROWS.counts)

    async def rebuild() -> None:
        await stores.build(rebuilt, FACTS)
        shutil.rmtree(stores.folder(old))

    _with(stores, _ActsOnce).act = rebuild
    assert_equal_rows((await stores.load(FACTS)).rows, rebuilt)


async def test_a_cache_deleted_during_the_load_is_not_found_or_whole(stores: Stores) -> None:
    cache = await _committed(stores)

    async def delete() -> None:
        await stores.metadata.delete_context(TENANT, "ctx_01")
        shutil.rmtree(stores.folder(cache))

    _with(stores, _ActsOnce).act = delete
    with pytest.raises(NotFound, match="cache"):
        await stores.load(FACTS)


async def test_a_read_lease_is_held_to_the_end_and_given_back(stores: Stores) -> None:
    cache = await _committed(stores)
    seen: list[int] = []

    async def look() -> None:
        seen.append(await stores.leases.readers(TENANT, cache.cache_id))

    _with(stores, _ActsOnce).act = look
    await stores.load(FACTS)
    assert seen == [1]
    assert await stores.leases.readers(TENANT, cache.cache_id) == 0
    (stores.folder(cache) / "manifest.json").unlink()
    with pytest.raises(Corrupt):
        await stores.load(FACTS)
    assert await stores.leases.readers(TENANT, cache.cache_id) == 0


async def test_a_cancelled_load_gives_its_lease_back(stores: Stores) -> None:
    cache = await _committed(stores)
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    _with(stores, _ActsOnce).act = hang
    loading = asyncio.create_task(stores.load(FACTS))
    await reached.wait()
    loading.cancel()
    with suppress(asyncio.CancelledError):
        await loading
    assert await stores.leases.readers(TENANT, cache.cache_id) == 0
