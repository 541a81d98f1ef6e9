"""Ragged contexts and dense tails with random rows, for kernel tests."""

from collections.abc import Sequence

import torch

from kvkeep_kernels.layout import DenseKV, RaggedKV


def ragged(
    lengths: Sequence[int], head_dim: int, seed: int, dtype: torch.dtype = torch.float32
) -> RaggedKV:
    torch.manual_seed(seed)
    length = torch.tensor(lengths, dtype=torch.int32)
    start = (torch.cumsum(length, 0) - length).to(torch.int32)
    k, v = torch.randn(2, sum(lengths), head_dim, dtype=dtype)
    return RaggedKV(k, v, start, length)


def dense(heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> DenseKV:
    k, v = torch.randn(2, heads, tokens, head_dim, dtype=dtype)
    return DenseKV(k, v)
