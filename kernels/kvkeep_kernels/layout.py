"""Value types of the kernels room: ragged context rows, dense tails, and what is refused.

    KernelError
    └── ShapeError      a tensor's shape, dtype or device does not fit the others

Invariants are checked once, when a value is made; the functions that take it trust it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelError(Exception):
    """Something a kernel was given cannot be computed on."""


class ShapeError(KernelError):
    """A tensor does not have the shape, dtype or device that the others ask for."""

    def __init__(self, name: str, found: object, expected: object) -> None:
        super().__init__(f"{name}: found {found}, expected {expected}")
        self.name = name
        self.found = found
        self.expected = expected


@dataclass(frozen=True, slots=True)
class RaggedKV:
    """The compressed KV of one layer: one contiguous run of rows per KV head.

    Shapes: k, v [rows, head_dim]; start, length [num_kv_heads] int32. Head h owns the rows
    ``start[h] : start[h] + length[h]``. Inside a head the order is protected rows first,
    then importance descending, so any shorter ``length`` is a valid, smaller cache.
    Limits: attention does not depend on the order of rows; nothing here checks it.
    """

    k: Tensor
    v: Tensor
    start: Tensor
    length: Tensor

    def __post_init__(self) -> None:
        if self.k.ndim != 2 or self.k.shape != self.v.shape:
            raise ShapeError("context.v", tuple(self.v.shape), tuple(self.k.shape))
        if self.k.dtype not in SUPPORTED_DTYPES or self.v.dtype != self.k.dtype:
            raise ShapeError("context.k dtype", self.k.dtype, SUPPORTED_DTYPES)
        if self.start.ndim != 1 or self.start.shape != self.length.shape:
            raise ShapeError("context.length", tuple(self.length.shape), tuple(self.start.shape))
        if self.start.dtype != torch.int32 or self.length.dtype != torch.int32:
            raise ShapeError("context.start dtype", self.start.dtype, torch.int32)
        end = (self.start.long() + self.length.long()).max().item()
        if self.start.min().item() < 0 or self.length.min().item() < 0 or end > len(self.k):
            raise ShapeError("context.start + context.length", end, f"within {len(self.k)} rows")

    @property
    def num_kv_heads(self) -> int:
        """Heads that own a run."""
        return len(self.start)

    @property
    def head_dim(self) -> int:
        """Width of a row."""
        return self.k.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of K and V held, whatever ``length`` says."""
        return self.k.nbytes + self.v.nbytes

    def head_rows(self, head: int) -> tuple[Tensor, Tensor]:
        """K and V of one head, each [length, head_dim], as views."""
        start, length = int(self.start[head]), int(self.length[head])
        return self.k[start : start + length], self.v[start : start + length]

    def truncated(self, length: Tensor) -> "RaggedKV":
        """The same buffers with a shorter run per head: how a lower ratio is served.

        Shapes: length [num_kv_heads] int32, each at most the present one.
        """
        if bool((length > self.length).any()):
            raise ShapeError("length", length.tolist(), f"at most {self.length.tolist()}")
        return RaggedKV(self.k, self.v, self.start, length)


@dataclass(frozen=True, slots=True)
class DenseKV:
    """Rows that every head has: a query's tail, or a piece of an uncompressed cache.

    Shapes: k, v [num_kv_heads, tokens, head_dim]; views are welcome, nothing is copied.
    """

    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        if self.k.ndim != 3 or self.k.shape != self.v.shape:
            raise ShapeError("dense.v", tuple(self.v.shape), tuple(self.k.shape))
        if self.k.dtype not in SUPPORTED_DTYPES or self.v.dtype != self.k.dtype:
            raise ShapeError("dense.k dtype", self.k.dtype, SUPPORTED_DTYPES)

    @property
    def tokens(self) -> int:
        """Rows of every head."""
        return self.k.shape[1]
