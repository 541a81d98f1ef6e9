"""Ragged contexts and dense tails with random rows, for kernel tests."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvkeep_kernels.layout import CodeKind, ContextRows, DenseKV, Placement, RaggedKV
from kvkeep_kernels.quantize import quantize_kv

KINDS: tuple[CodeKind, ...] = ("int8", "int4", "fp8")


def ragged(
    lengths: Sequence[int], head_dim: int, seed: int, dtype: torch.dtype = torch.float32
) -> RaggedKV:
    torch.manual_seed(seed)
    length = torch.tensor(lengths, dtype=torch.int32)
    start = (torch.cumsum(length, 0) - length).to(torch.int32)
    k, v = torch.randn(2, sum(lengths), head_dim, dtype=dtype)
    return RaggedKV(k, v, start, length)


def quantized(rows: RaggedKV, kind: CodeKind | None) -> ContextRows:
    """The rows in codes of a kind, or as they are with None.

    Of int4 every other row of K is shifted by channel means, so that some rows lose them and
    some do not.
    """
    if kind is None:
        return rows
    if kind != "int4":
        return quantize_kv(rows, kind)
    means = torch.randn(rows.num_kv_heads, rows.head_dim).mul(3).half()
    shift = torch.repeat_interleave(means.float(), rows.length, dim=0)
    shift[1::2] = 0
    return quantize_kv(replace(rows, k=rows.k + shift.to(rows.k.dtype)), "int4", means)


def placed(rows: RaggedKV, tokens: int) -> RaggedKV:
    """The rows at random positions of a text of ``tokens``, each head's in an order of its own."""
    positions = torch.randint(0, tokens, (len(rows.k),), dtype=torch.int32)
    return replace(rows, placement=Placement(positions, tokens))


def dense(heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> DenseKV:
    k, v = torch.randn(2, heads, tokens, head_dim, dtype=dtype)
    return DenseKV(k, v)
