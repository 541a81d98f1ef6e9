"""Copies in host memory: bit for bit, in a budget, gone when they are to go."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.host_tier import HostTier, moved, pinned_memory
from kvkeep_service.rows import to_engine
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores
from kvkeep_storage.artifact import CacheDtype

from ...support.caches import prefix_of, random_rows
from .serving import serving

pytestmark = pytest.mark.anyio

CPU = torch.device("cpu")
ROWS = random_rows()
CONTEXT = to_engine(ROWS, 900, CPU)
A, B, C = (CacheKey("acme", name) for name in "abc")


def tensors_of(context: ResidentContext) -> list[Tensor]:
    parts = [*context.layers, *(layer.placement for layer in context.layers if layer.placement)]
    found = [getattr(part, item.name) for part in parts for item in fields(part)]
    tensors = [value for value in found if isinstance(value, Tensor)]
    return [*tensors, *(context.remainders or ())]


SIZE_BYTES = sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors_of(CONTEXT))


def a_prefix(bands: int) -> ResidentContext:
    return to_engine(prefix_of(ROWS, bands), 900, CPU)


def poisoned(num_bytes: int) -> memoryview:
    """Memory that still holds something."""
    return memoryview(bytearray(b"\xff" * num_bytes))


def tier(budget_bytes: int = 10**9) -> HostTier:
    return HostTier(budget_bytes, poisoned)


async def keep(
    host: HostTier, key: CacheKey, context: ResidentContext = CONTEXT, cost_seconds: float = 1.0
) -> None:
    host.keep(key, context, cost_seconds)
    await host.close()


def found(host: HostTier, key: CacheKey, ratio: float = 0.3) -> ResidentContext:
    context = host.find(key, ratio)
    assert context is not None
    return context


def assert_same_bits(here: ResidentContext, there: ResidentContext) -> None:
    assert (here.ratios, here.num_tokens) == (there.ratios, there.num_tokens)
    assert torch.equal(here.counts, there.counts)
    for one, other in zip(tensors_of(here), tensors_of(there), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [8, 7])
async def test_field_19_rows_come_back_from_the_host_bit_for_bit(
    dtype: CacheDtype, head_dim: int
) -> None:
    windows = [None, 40] * 8
    given_up, expected = (
        to_engine(random_rows(dtype=dtype, head_dim=head_dim, remainder=True), 900, CPU, windows)
        for _ in range(2)
    )
    assert {layer.placement is None for layer in expected.layers} == {True, False}
    host = tier()
    await keep(host, A, given_up)
    # The device's memory is used for something else.
    for tensor in tensors_of(given_up):
        tensor.zero_()
    assert_same_bits(moved(found(host, A), CPU), expected)
    # Also a second time.
    assert_same_bits(moved(found(host, A), CPU), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_field_19_rows_go_to_a_device_and_back_through_pinned_memory_bit_for_bit(
    dtype: CacheDtype,
) -> None:
    rows = random_rows(dtype=dtype, head_dim=64, rows_max=3000, remainder=True)
    expected = to_engine(rows, 900, CPU)
    host = HostTier(10**9, pinned_memory)
    there = to_engine(rows, 900, torch.device("cuda"))
    for _ in range(2):
        await keep(host, A, there)
        assert found(host, A).layers[1].v.is_pinned()
        there = moved(found(host, A), torch.device("cuda"))
        assert there.layers[1].v.is_cuda
        assert_same_bits(there, expected)
        host.drop(A)


async def test_a_copy_answers_only_for_ratios_it_is_cut_at() -> None:
    host = tier()
    await keep(host, A, a_prefix(2))
    assert host.find(A, 0.3) is None
    assert host.find(B, 0.1) is None
    assert host.find(A, 0.1) is not None
    stats = host.stats()
    assert (stats.hits, stats.misses, stats.entries) == (1, 2, 1)


async def test_more_bands_replace_fewer_and_never_the_other_way_round() -> None:
    host = tier()
    for bands in (1, 3, 2):
        await keep(host, A, a_prefix(bands))
    assert_same_bits(found(host, A), CONTEXT)
    assert host.stats().size_bytes == SIZE_BYTES


async def test_the_budget_holds_and_what_is_dear_to_load_again_stays() -> None:
    host = tier(2 * SIZE_BYTES)
    await keep(host, A, cost_seconds=9.0)
    await keep(host, B, cost_seconds=1.0)
    await keep(host, C, cost_seconds=1.0)
    assert set(host.keys) == {A, C}
    assert (host.stats().size_bytes, host.stats().evictions) == (2 * SIZE_BYTES, 1)
    small = tier(SIZE_BYTES - 1)
    await keep(small, A)
    assert (small.keys, small.stats().size_bytes) == ([], 0)


async def test_what_the_device_gives_up_again_counts_as_used() -> None:
    host = tier(2 * SIZE_BYTES)
    for key in (A, B, A, C):
        await keep(host, key)
    assert set(host.keys) == {A, C}


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
    host.keep(A, CONTEXT, 1.0)
    await asyncio.to_thread(held.asked.wait, 60)
    # What is being copied counts, and is no victim.
    assert host.stats().size_bytes == SIZE_BYTES
    host.drop(A)
    # Of the same name, and another copy.
    host.keep(A, a_prefix(1), 1.0)
    held.go_on.set()
    await host.close()
    assert host.find(A, 0.3) is None
    assert host.find(A, 0.05) is not None
    host.drop(A)
    assert (host.keys, host.stats().size_bytes) == ([], 0)


async def test_what_is_being_copied_is_neither_copied_twice_nor_evicted(held: Held) -> None:
    host = HostTier(SIZE_BYTES, held)
    for key in (A, A, B):
        host.keep(key, CONTEXT, 1.0)
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
        # Built here, and given up at once.
        await host.close()
        first = await service.answer(request)
        host.drop(CacheKey(request.tenant, request.cache_id))
        stored = await service.answer(request)
        await host.close()
        again = await service.answer(request)
        sources = [answer.timings.source for answer in (first, stored, again)]
        assert sources == ["host", "store", "host"]
        assert first.token_ids == stored.token_ids == again.token_ids
        stats = service.worker.stats()
        assert (stats.resident_caches, stats.host_caches) == (0, 1)
        assert stats.host_bytes == host.stats().size_bytes > 0
        held = (request.tenant, request.cache_id)
        assert service.worker.resident() == [held]
        await service.worker.drop(*held)
        assert service.worker.resident() == []
        assert (await service.answer(request)).timings.source == "store"
