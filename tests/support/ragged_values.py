"""Ragged contexts and dense tails with random rows, for kernel tests."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvkeep_kernels.layout import ContextRows, DenseKV, Placement, RaggedKV
from kvkeep_kernels.quantize import quantize_kv


def ragged(
    lengths: Sequence[int], head_dim: int, seed: int, dtype: torch.dtype = torch.float32
) -> RaggedKV:
    torch.manual_seed(seed)
    length = torch.tensor(lengths, dtype=torch.int32)
    start = (torch.cumsum(length, 0) - length).to(torch.int32)
    k, v = torch.randn(2, sum(lengths), head_dim, dtype=dtype)
    return RaggedKV(k, v, start, length)


def quantized(rows: RaggedKV, bits: int) -> ContextRows:
    """The rows in ``bits`` a number, or as they are with 0; the channel means are random."""
    if bits == 0:
        return rows
    means = torch.randn(rows.num_kv_heads, rows.head_dim).half() if bits == 4 else None
    return quantize_kv(rows, bits, means)


def placed(rows: RaggedKV, tokens: int) -> RaggedKV:
    """The rows at random positions of a text of ``tokens``, each head's in an order of its own."""
    positions = torch.randint(0, tokens, (len(rows.k),), dtype=torch.int32)
    return replace(rows, placement=Placement(positions, tokens))


def dense(heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> DenseKV:
    k, v = torch.randn(2, heads, tokens, head_dim, dtype=dtype)
    return DenseKV(k, v)
