"""Value types of the kernels room: ragged context rows, dense tails, and what is refused.

    KernelError
    ├── ShapeError          a tensor's shape, dtype or device does not fit the others
    └── KernelUnavailable   the kernels asked for cannot run on this device

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


class KernelUnavailable(KernelError):
    """The operator asked for kernels that cannot run where they were asked for."""

    def __init__(self, asked: str, reason: str) -> None:
        super().__init__(f"{asked}: {reason}")
        self.asked = asked
        self.reason = reason


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

    def check_tail(self, tail: "DenseKV") -> None:
        """Raise ShapeError unless a tail's heads, width, dtype and device are this context's."""
        expected = (self.num_kv_heads, self.head_dim, self.k.dtype, self.k.device)
        found = (tail.k.shape[0], tail.k.shape[2], tail.k.dtype, tail.k.device)
        if found != expected:
            raise ShapeError("tail", found, expected)

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


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that decode over one context at one step: its rows are read once for all.

    Shapes: tails[i].k [num_kv_heads, tail_tokens_i, head_dim], at least one row each, the new
    token's own last.
    """

    context: RaggedKV
    tails: tuple[DenseKV, ...]

    def __post_init__(self) -> None:
        tokens = [tail.tokens for tail in self.tails]
        if not tokens or min(tokens) < 1:
            raise ShapeError("tails", tokens, "one or more tails of 1 or more rows")
        for tail in self.tails:
            self.context.check_tail(tail)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Every sequence of one decode step in one layer; sequences are numbered group by group."""

    groups: tuple[DecodeGroup, ...]

    def __post_init__(self) -> None:
        contexts = [group.context for group in self.groups]
        kinds = {
            (rows.num_kv_heads, rows.head_dim, rows.k.dtype, rows.k.device) for rows in contexts
        }
        if len(kinds) != 1:
            raise ShapeError("groups", kinds, "one or more, alike in heads, width, dtype, device")

    @property
    def num_sequences(self) -> int:
        """Tails of all groups."""
        return sum(len(group.tails) for group in self.groups)
