"""Value types of the kernels room: ragged context rows, dense tails, and what is refused.

    KernelError
    ├── ShapeError          a tensor's shape, dtype or device does not fit the others
    ├── OutOfRange          a value that the scales of a quantised row cannot hold
    └── KernelUnavailable   the kernels asked for cannot run on this device

Invariants are checked once, when a value is made; the functions that take it trust it.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CodeKind = Literal["int8", "int4", "fp8"]
"""What the numbers of a quantised row are: integers of 8 or 4 bits, or floats of 8 (e4m3)."""


class KernelError(Exception):
    """Something a kernel was given cannot be computed on."""


class ShapeError(KernelError):
    """A tensor does not have the shape, dtype or device that the others ask for."""

    def __init__(self, name: str, found: object, expected: object) -> None:
        super().__init__(f"{name}: found {found}, expected {expected}")
        self.name = name
        self.found = found
        self.expected = expected


class OutOfRange(KernelError):
    """A row to be quantised holds NaN, or a value beyond float16, which its scales are kept in."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: every value must be finite and within float16's range")
        self.name = name


class KernelUnavailable(KernelError):
    """The operator asked for kernels that cannot run where they were asked for."""

    def __init__(self, asked: str, reason: str) -> None:
        super().__init__(f"{asked}: {reason}")
        self.asked = asked
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Placement:
    """Where rows stood in the text, which layers with a sliding window have to know.

    Shapes: positions [rows] int32, contiguous, of every row of a context. ``end``: the position of
    a tail's first row. Limits: that positions are below ``end`` is not checked.
    """

    positions: Tensor
    end: int


@dataclass(frozen=True, slots=True)
class LogitBounds:
    """What some layers do to logits before the softmax (Gemma); None where they do not.

    soft_cap: a logit s becomes ``soft_cap * tanh(s / soft_cap)``. window: a token at position p
    sees those above ``p - window``, itself included; contexts must have a ``placement``.
    """

    soft_cap: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ShapeError("soft_cap", self.soft_cap, "above 0")
        if self.window is not None and self.window < 1:
            raise ShapeError("window", self.window, "at least 1")


UNBOUNDED = LogitBounds()


@dataclass(frozen=True, slots=True)
class RaggedKV:
    """The compressed KV of one layer: one contiguous run of rows per KV head.

    Shapes: k, v [rows, head_dim]; start, length [num_kv_heads] int32. Head h owns the rows
    ``start[h] : start[h] + length[h]``. Inside a head the order is protected rows first,
    then importance descending, so any shorter ``length`` is a valid, smaller cache.
    ``prepared``: what a CPU made of start and length, by number of threads, for every later step.
    ``host_runs``: for ``runs_on_host``.
    Limits: attention does not depend on the order of rows; nothing here checks it.
    """

    k: Tensor
    v: Tensor
    start: Tensor
    length: Tensor
    placement: Placement | None = None
    prepared: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    host_runs: list[tuple[int, int]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.k.ndim != 2 or self.k.shape != self.v.shape:
            raise ShapeError("context.v", tuple(self.v.shape), tuple(self.k.shape))
        if self.k.dtype not in SUPPORTED_DTYPES or self.v.dtype != self.k.dtype:
            raise ShapeError("context.k dtype", self.k.dtype, SUPPORTED_DTYPES)
        _check_runs(self.start, self.length, len(self.k))
        _check_placement(self.placement, self.k)

    @property
    def dtype(self) -> torch.dtype:
        """What its queries and tails are in."""
        return self.k.dtype

    @property
    def num_kv_heads(self) -> int:
        """Heads that own a run."""
        return self.start.shape[0]

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
        _check_shorter(length, self.length)
        return replace(self, length=length)


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """As ``RaggedKV``, with 8 or 4 bits a number: ``zero + scale * code``, by row.

    Shapes: k, v uint8 [rows, head_dim], of int4 [rows, head_dim / 2], contiguous; k_scale, k_zero,
    v_scale, v_zero [rows] float16; start, length as there. Of fp8 a code is a float, whose sign
    needs no zero: k_zero and v_zero are None. Of int4, byte j of a row holds channel 2 j in
    its low half and channel 2 j + 1 in its high half, and k_mean [num_kv_heads, head_dim]
    float16 is to be added to rows of K, but for those of a negative scale, whose size counts;
    of others there is none, and no scale is negative.
    ``dtype`` is what its queries and tails are in: the dtype that was quantised.
    """

    kind: CodeKind
    k: Tensor
    v: Tensor
    k_scale: Tensor
    k_zero: Tensor | None
    v_scale: Tensor
    v_zero: Tensor | None
    k_mean: Tensor | None
    start: Tensor
    length: Tensor
    dtype: torch.dtype
    placement: Placement | None = None
    host_runs: list[tuple[int, int]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.k.ndim != 2:
            raise ShapeError("context.k", tuple(self.k.shape), "[rows, packed width]")
        rows, width = self.k.shape
        for name in ("k", "v"):
            part: Tensor = getattr(self, name)
            if part.dtype != torch.uint8 or part.shape != (rows, width) or not part.is_contiguous():
                expected = f"contiguous uint8 {(rows, width)}"
                raise ShapeError(f"context.{name}", (part.dtype, tuple(part.shape)), expected)
        for name in ("k_scale", "v_scale"):
            _check_half(f"context.{name}", getattr(self, name), (rows,))
        for name in ("k_zero", "v_zero"):
            self._check_optional(name, self.kind != "fp8", (rows,))
        self._check_optional("k_mean", self.kind == "int4", (self.num_kv_heads, self.head_dim))
        if self.dtype not in SUPPORTED_DTYPES:
            raise ShapeError("context.dtype", self.dtype, SUPPORTED_DTYPES)
        _check_runs(self.start, self.length, rows)
        _check_placement(self.placement, self.k)

    @property
    def num_kv_heads(self) -> int:
        """Heads that own a run."""
        return self.start.shape[0]

    @property
    def head_dim(self) -> int:
        """Channels of a row."""
        return self.k.shape[1] * (2 if self.kind == "int4" else 1)

    @property
    def size_bytes(self) -> int:
        """Bytes of K and V held with their scales, whatever ``length`` says."""
        parts = (self.k, self.v, self.k_scale, self.k_zero, self.v_scale, self.v_zero)
        return sum(part.nbytes for part in parts if part is not None)

    def truncated(self, length: Tensor) -> "QuantizedKV":
        """As ``RaggedKV.truncated``."""
        _check_shorter(length, self.length)
        return replace(self, length=length)

    def _check_optional(self, name: str, is_due: bool, shape: tuple[int, ...]) -> None:
        part: Tensor | None = getattr(self, name)
        if (part is not None) != is_due:
            found = f"{'none' if part is None else 'one'} with {self.kind}"
            raise ShapeError(f"context.{name}", found, "one" if is_due else "none")
        if part is not None:
            _check_half(f"context.{name}", part, shape)


ContextRows = RaggedKV | QuantizedKV
"""The compressed KV of one layer, in either form."""


def runs_on_host(context: ContextRows) -> list[tuple[int, int]]:
    """Start and length of every head's run, for code that cuts them where torch serves.

    Waits for the device at the first call for a context, and at no other.
    """
    if not context.host_runs:
        starts, lengths = context.start.tolist(), context.length.tolist()
        context.host_runs.extend(zip(starts, lengths, strict=True))
    return context.host_runs


def check_bounds(context: ContextRows, bounds: LogitBounds) -> None:
    """Raise ShapeError when a window is asked for over rows that stand nowhere."""
    if bounds.window is not None and context.placement is None:
        raise ShapeError("context.placement", None, f"positions, for a window of {bounds.window}")


def check_tail(context: ContextRows, tail: "DenseKV") -> None:
    """Raise ShapeError unless a tail's heads, width, dtype and device are its context's."""
    expected = (context.num_kv_heads, context.head_dim, context.dtype, context.k.device)
    found = (tail.k.shape[0], tail.k.shape[2], tail.k.dtype, tail.k.device)
    if found != expected:
        raise ShapeError("tail", found, expected)


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

    context: ContextRows
    tails: tuple[DenseKV, ...]

    def __post_init__(self) -> None:
        tokens = [tail.tokens for tail in self.tails]
        if not tokens or min(tokens) < 1:
            raise ShapeError("tails", tokens, "one or more tails of 1 or more rows")
        for tail in self.tails:
            check_tail(self.context, tail)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Every sequence of one decode step in one layer; sequences are numbered group by group."""

    groups: tuple[DecodeGroup, ...]

    def __post_init__(self) -> None:
        contexts = [group.context for group in self.groups]
        kinds = {(rows.num_kv_heads, rows.head_dim, rows.dtype, rows.k.device) for rows in contexts}
        if len(kinds) != 1:
            raise ShapeError("groups", kinds, "one or more, alike in heads, width, dtype, device")

    @property
    def num_sequences(self) -> int:
        """Tails of all groups."""
        return sum(len(group.tails) for group in self.groups)


def _check_runs(start: Tensor, length: Tensor, rows: int) -> None:
    if start.ndim != 1 or start.shape != length.shape:
        raise ShapeError("context.length", tuple(length.shape), tuple(start.shape))
    if start.dtype != torch.int32 or length.dtype != torch.int32:
        raise ShapeError("context.start dtype", start.dtype, torch.int32)
    end = (start.long() + length.long()).max().item()
    if start.min().item() < 0 or length.min().item() < 0 or end > rows:
        raise ShapeError("context.start + context.length", end, f"within {rows} rows")


def _check_placement(placement: Placement | None, k: Tensor) -> None:
    if placement is None:
        return
    positions = placement.positions
    expected = (torch.int32, (len(k),), k.device)
    found = (positions.dtype, tuple(positions.shape), positions.device)
    if found != expected or not positions.is_contiguous():
        raise ShapeError("placement.positions", found, expected)


def _check_shorter(length: Tensor, present: Tensor) -> None:
    if bool((length > present).any()):
        raise ShapeError("length", length.tolist(), f"at most {present.tolist()}")


def _check_half(name: str, part: Tensor, shape: tuple[int, ...]) -> None:
    if part.dtype != torch.float16 or part.shape != shape or not part.is_contiguous():
        raise ShapeError(name, (part.dtype, tuple(part.shape)), f"contiguous float16 {shape}")
