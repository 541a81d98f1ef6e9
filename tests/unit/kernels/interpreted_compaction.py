"""Triton's gather equals torch's indexing; run by ``test_triton_compaction`` interpreted."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels._triton import compaction as kernels
from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.compaction import compact, select
from kvkeep_kernels.layout import DenseKV, RaggedKV

from ...support.triton_interpreter import mutated, poisoned_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cache_of(heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> DenseKV:
    """Views into wider buffers, K and V strided differently."""
    k = torch.randn(heads, tokens + 2, head_dim, dtype=dtype)[:, 1:-1]
    v = torch.randn(tokens, heads, head_dim, dtype=dtype).transpose(0, 1)
    return DenseKV(k, v)


def gathered(cache: DenseKV, positions: torch.Tensor, length: torch.Tensor) -> RaggedKV:
    with poisoned_memory():
        return compact(cache, positions, length)


def check(cache: DenseKV, positions: torch.Tensor, length: torch.Tensor) -> None:
    rows = gathered(cache, positions, length)
    heads = torch.repeat_interleave(torch.arange(len(length)), length)
    assert rows.length.tolist() == length.tolist()
    assert rows.start.tolist() == (torch.cumsum(length, 0) - length).tolist()
    assert torch.equal(rows.k, cache.k[heads, positions])
    assert torch.equal(rows.v, cache.v[heads, positions])


def test_triton_serves_these_tests() -> None:
    assert uses_triton(torch.device("cpu"))


@settings(max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 31, 32, 33, 150]), min_size=1, max_size=5),
    tokens=st.sampled_from([1, 40]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_every_row_comes_from_its_head_and_position(
    lengths: list[int], tokens: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    cache = cache_of(len(lengths), tokens, head_dim, dtype)
    check(cache, torch.randint(0, tokens, (sum(lengths),)), torch.tensor(lengths))


def test_a_selection_is_gathered_in_its_order() -> None:
    torch.manual_seed(1)
    scores = torch.randint(0, 5, (2, 3, 60)) / 5
    selection = select(scores, torch.arange(60) < 4, (0.3,))
    cache = cache_of(3, 60, 64, torch.float32)
    for layer, positions in enumerate(selection.positions):
        check(cache, positions, selection.counts[:, layer].sum(0))


@pytest.mark.parametrize("outside", [-1, 7, 2**40])
def test_a_position_outside_the_cache_copies_nothing_foreign(outside: int) -> None:
    cache = cache_of(2, 7, 64, torch.float32)
    rows = gathered(cache, torch.tensor([3, outside, 6, 0]), torch.tensor([2, 2]))
    assert torch.equal(rows.k[[0, 2, 3]], cache.k[[0, 1, 1], [3, 6, 0]])
    assert rows.k[1].isnan().all()
    assert rows.v[1].isnan().all()


def test_the_copy_aliases_nothing() -> None:
    cache = cache_of(1, 4, 64, torch.float32)
    rows = gathered(cache, torch.arange(4), torch.tensor([4]))
    before = rows.k.clone()
    cache.k.zero_()
    assert torch.equal(rows.k, before)


MUTANTS = {
    "head-one-late": ("ends[None, :] <= row", "ends[None, :] < row"),
    "values-for-keys": ("tl.load(v + v_from", "tl.load(k + v_from"),
    "head-stride-of-keys": ("head * v_head_stride", "head * k_head_stride"),
    "position-one-off": ("position * k_row_stride", "(position + 1) * k_row_stride"),
    "heads-not-counted": ("which < num_kv_heads", "which < num_kv_heads - 2"),
    "first-block-only": ("tl.program_id(0) * BLOCK_ROWS", "0 * tl.program_id(0)"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_gather_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = mutated(kernels, *MUTANTS[mutant], tmp_path)
    monkeypatch.setattr(kernels, "gather", broken.gather)
    cache = cache_of(3, 40, 64, torch.float32)
    with pytest.raises(AssertionError):
        check(cache, torch.randint(0, 39, (300,)), torch.tensor([100, 60, 140]))
