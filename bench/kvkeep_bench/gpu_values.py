"""Contexts, tails and queries of real shapes, filled at random on the device."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvkeep_kernels.layout import CodeKind, DenseKV, QuantizedKV, RaggedKV
from kvkeep_kernels.quantize import quantize_kv

KINDS: Final[tuple[CodeKind, ...]] = ("int8", "fp8", "int4")
"""Every kind of codes that rows may be in."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's attention. ``name``: a model that has it."""

    name: str
    num_kv_heads: int
    group_size: int
    head_dim: int

    @property
    def num_q_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def scale(self) -> float:
        """Of the logits."""
        return self.head_dim**-0.5

    def full_bytes(self, tokens: int, element_bytes: int = 2) -> int:
        """K and V of one layer, nothing evicted."""
        return 2 * self.num_kv_heads * tokens * self.head_dim * element_bytes


# Qwen3-8B differs from Llama-3.1-8B in the number of layers only (36 and 32).
LLAMA_8B = Shape("Llama-3.1-8B, Qwen3-8B", 8, 4, 128)
SMOLLM2 = Shape("SmolLM2-135M", 3, 3, 64)
GEMMA_SMALL = Shape("Gemma-3-270M", 1, 4, 256)


class Values:
    """Random tensors on one device; every call gives fresh ones."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal."""
        found = torch.randn(shape, generator=self._generator, device=self.device)
        return found.to(self.dtype)

    def lengths(self, shape: Shape, tokens: int, ratio: float) -> Tensor:
        """Kept rows of every head, adding up to ``ratio``: 0.1 to 1.9 of a fair share each."""
        wanted = round(ratio * tokens * shape.num_kv_heads)
        if ratio >= 1.0:
            return torch.full((shape.num_kv_heads,), tokens, dtype=torch.int32)
        weights = torch.linspace(0.1, 1.9, shape.num_kv_heads) if shape.num_kv_heads > 1 else None
        if weights is None:
            return torch.tensor([wanted], dtype=torch.int32)
        length = (weights / weights.sum() * wanted).round().clamp(1, tokens).to(torch.int32)
        short = wanted - int(length.sum())
        length[int(length.argmin() if short > 0 else length.argmax())] += short
        return length

    def context(self, shape: Shape, lengths: Tensor) -> RaggedKV:
        """A compressed layer with these runs."""
        rows = int(lengths.sum())
        start = (torch.cumsum(lengths, 0) - lengths).to(torch.int32)
        k, v = self.normal(rows, shape.head_dim), self.normal(rows, shape.head_dim)
        return RaggedKV(k, v, start.to(self.device), lengths.to(self.device))

    def quantized(self, shape: Shape, lengths: Tensor, kind: CodeKind) -> QuantizedKV:
        """The same in codes; of int4, about each head's mean."""
        rows = self.context(shape, lengths)
        mean = None
        if kind == "int4":
            mean = self.normal(shape.num_kv_heads, shape.head_dim).half()
        return quantize_kv(rows, kind, mean)

    def dense(self, shape: Shape, tokens: int) -> DenseKV:
        """Rows that every head has."""
        size = (shape.num_kv_heads, tokens, shape.head_dim)
        return DenseKV(self.normal(*size), self.normal(*size))

    def queries(self, shape: Shape, sequences: int) -> Tensor:
        """One new token of every sequence."""
        return self.normal(sequences, shape.num_q_heads, shape.head_dim)
