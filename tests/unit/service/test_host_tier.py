"""Copies in host memory: bit for bit, in a budget, gone when they are to go."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.host_tier import HostTier, pinned_memory
from kvkeep_service.rows import to_engine
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores
from kvkeep_storage.artifact import CacheDtype, CacheRows

from ...support.caches import assert_equal_rows, prefix_of, random_rows
from .serving import serving

pytestmark = pytest.mark.anyio

ROWS = random_rows()
SIZE_BYTES = sum(
    -(-part.nbytes // 64) * 64
    for layer in ROWS.layers
    for part in (layer.k, layer.v, layer.position)
)
A, B, C = (CacheKey("acme", name) for name in "abc")


def poisoned(num_bytes: int) -> memoryview:
    """Memory that still holds something."""
    return memoryview(bytearray(b"\xff" * num_bytes))


def tier(budget_bytes: int = 10**9) -> HostTier:
    return HostTier(budget_bytes, poisoned)


async def keep(host: HostTier, key: CacheKey, rows: CacheRows = ROWS, cost: float = 1.0) -> None:
    host.keep(key, rows, 900, cost_seconds=cost)
    await host.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [8, 7])
async def test_field_19_rows_come_back_from_the_host_bit_for_bit(
    dtype: CacheDtype, head_dim: int
) -> None:
    rows = random_rows(dtype=dtype, head_dim=head_dim)
    expected = random_rows(dtype=dtype, head_dim=head_dim)
    host = tier()
    await keep(host, A, rows)
    for layer in rows.layers:
        layer.k[:] = 0
        layer.v[:] = 0
    found = host.find(A, 0.3)
    assert found is not None
    assert found.num_tokens == 900
    assert_equal_rows(found.rows, expected)
    there = to_engine(found.rows, found.num_tokens, torch.device("cpu"))
    for layer, before in zip(there.layers, expected.layers, strict=True):
        np.testing.assert_array_equal(layer.k.view(torch.uint8).numpy(), before.k)
        np.testing.assert_array_equal(layer.v.view(torch.uint8).numpy(), before.v)
    assert there.ratios == expected.ratios


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_field_19_rows_go_to_a_device_and_back_through_pinned_memory_bit_for_bit(
    dtype: CacheDtype,
) -> None:
    rows = random_rows(dtype=dtype, head_dim=64, rows_max=3000)
    host = HostTier(10**9, pinned_memory)
    await keep(host, A, rows)
    for _ in range(2):
        found = host.find(A, 0.3)
        assert found is not None
        assert torch.from_numpy(found.rows.layers[1].v).is_pinned()
        there = to_engine(found.rows, found.num_tokens, torch.device("cuda"))
        for layer, before in zip(there.layers, rows.layers, strict=True):
            assert layer.k.is_cuda
            np.testing.assert_array_equal(layer.k.cpu().view(torch.uint8).numpy(), before.k)
            np.testing.assert_array_equal(layer.v.cpu().view(torch.uint8).numpy(), before.v)


async def test_a_copy_answers_only_for_ratios_it_is_cut_at() -> None:
    host = tier()
    await keep(host, A, prefix_of(ROWS, 2))
    assert host.find(A, 0.3) is None
    assert host.find(B, 0.1) is None
    assert host.find(A, 0.1) is not None
    stats = host.stats()
    assert (stats.hits, stats.misses, stats.entries) == (1, 2, 1)


async def test_more_bands_replace_fewer_and_never_the_other_way_round() -> None:
    host = tier()
    await keep(host, A, prefix_of(ROWS, 1))
    await keep(host, A, ROWS)
    await keep(host, A, prefix_of(ROWS, 2))
    found = host.find(A, 0.3)
    assert found is not None
    assert_equal_rows(found.rows, ROWS)
    assert host.stats().size_bytes == SIZE_BYTES


async def test_the_budget_holds_and_what_is_dear_to_load_again_stays() -> None:
    host = tier(2 * SIZE_BYTES)
    await keep(host, A, cost=9.0)
    await keep(host, B, cost=1.0)
    await keep(host, C, cost=1.0)
    assert set(host.keys) == {A, C}
    assert (host.stats().size_bytes, host.stats().evictions) == (2 * SIZE_BYTES, 1)
    small = tier(SIZE_BYTES - 1)
    await keep(small, A)
    assert (small.keys, small.stats().size_bytes) == ([], 0)


async def test_without_memory_nothing_is_kept_and_nothing_fails() -> None:
    def none_left(num_bytes: int) -> memoryview:
        raise RuntimeError("CUDA error: out of memory")

    host = HostTier(10**9, none_left)
    await keep(host, A)
    assert (host.keys, host.stats().size_bytes) == ([], 0)


class Held:
    """An allocator that waits until it is told to go on."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, num_bytes: int) -> memoryview:
        self.asked.set()
        assert self.go_on.wait(60)
        return poisoned(num_bytes)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.go_on.set()


async def test_field_18_what_is_dropped_while_it_is_copied_is_not_kept(held: Held) -> None:
    host = HostTier(10**9, held)
    host.keep(A, ROWS, 900, cost_seconds=1.0)
    await asyncio.to_thread(held.asked.wait, 60)
    # What is being copied counts, and is no victim.
    assert host.stats().size_bytes == SIZE_BYTES
    host.drop(A)
    # Of the same name, and another copy.
    host.keep(A, prefix_of(ROWS, 1), 900, cost_seconds=1.0)
    held.go_on.set()
    await host.close()
    assert host.find(A, 0.3) is None
    assert host.find(A, 0.05) is not None
    host.drop(A)
    assert (host.keys, host.stats().size_bytes) == ([], 0)


async def test_what_is_being_copied_is_neither_copied_twice_nor_evicted(held: Held) -> None:
    host = HostTier(SIZE_BYTES, held)
    for key in (A, A, B):
        host.keep(key, ROWS, 900, cost_seconds=1.0)
    await asyncio.to_thread(held.asked.wait, 60)
    assert host.stats().size_bytes == SIZE_BYTES
    held.go_on.set()
    await host.close()
    assert host.keys == [A]


async def test_a_question_on_a_cache_in_host_memory_asks_no_store_and_gets_the_same_tokens(
    stores: Stores, tiny: LoadedModel
) -> None:
    """Forced on: this device's memory is the host's, and the copy is one all the same."""
    host = HostTier(10**9, poisoned)
    async with serving(stores, tiny, resident_bytes=0, host=host) as service:
        request = await service.ready()
        first = await service.answer(request)
        await host.close()
        second = await service.answer(request)
        assert (first.timings.source, second.timings.source) == ("store", "host")
        assert second.token_ids == first.token_ids
        stats = service.worker.stats()
        assert (stats.resident_caches, stats.host_caches) == (0, 1)
        assert stats.host_bytes == host.stats().size_bytes > 0
        held = (request.tenant, request.cache_id)
        assert service.worker.resident() == [held]
        await service.worker.drop(*held)
        assert service.worker.resident() == []
        assert (await service.answer(request)).timings.source == "store"
