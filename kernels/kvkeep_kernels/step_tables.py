"""Attention of a whole decode step on a GPU: where the rows of all layers are, in fixed buffers.

What is launched depends on the ``StepShape`` alone. Which contexts and tails are read, and how
long they are, stands in numbers on the device; so a step may be captured once in a graph, and be
replayed for other sequences when new numbers were copied into the same buffers. Sequences that are
missing have a tail of one row, and tiles that are missing no rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.layout import (
    CodeKind,
    ContextRows,
    LogitBounds,
    QuantizedKV,
    ShapeError,
    check_bounds,
)

_TILE, _SEQUENCE, _PLACE, _SCALES = 8, 8, 2, 5


class RowsByLayer(Protocol):
    """A context's rows of each layer, by its number."""

    def __getitem__(self, layer: int, /) -> ContextRows:
        """One layer's rows."""
        ...


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Sequences that decode over one context, in the layers of a step.

    Shapes: tails[i] [num_layers, K and V, num_kv_heads, capacity, head_dim], rows contiguous.
    """

    layers: RowsByLayer
    tails: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Everything that the launches of a decode step depend on.

    ``bounds`` of every layer. ``sequences``: for how many there is room. ``kind`` of the contexts'
    codes, None for plain rows. ``tile_rows``: query rows that share a read of K and V.
    """

    bounds: tuple[LogitBounds, ...]
    sequences: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype
    kind: CodeKind | None
    tile_rows: int

    @property
    def num_layers(self) -> int:
        """Layers of a step."""
        return len(self.bounds)

    @property
    def numbers(self) -> int:
        """How many numbers describe a step; even, so that what follows them is aligned."""
        columns = _TILE + _SEQUENCE + _PLACE + (_SCALES if self.kind else 0)
        count = self.num_layers * self.sequences * columns
        return count + count % 2


def tile_rows(
    members: Sequence[int],
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    kind: CodeKind | None,
) -> int:
    """``StepShape.tile_rows`` for contexts with so many members each."""
    from kvkeep_kernels._triton.softmax import tile_shape

    most = _members_max(tile_shape(head_dim, dtype, kind).block_m_max, group_size)
    rows = min(max(members), most) * group_size
    return max(16, 1 << (rows - 1).bit_length())


def kind_of(context: ContextRows) -> CodeKind | None:
    """What the contexts of one ``StepShape`` have in common."""
    return context.kind if isinstance(context, QuantizedKV) else None


class StepTables:
    """The tables of every layer, over a buffer that its owner fills."""

    def __init__(self, shape: StepShape, buffer: Tensor) -> None:
        """``buffer`` [shape.numbers] int64, on the device. Allocates no more than spare rows."""
        self.shape = shape
        size = shape.num_layers * shape.sequences
        columns = [_TILE, _SEQUENCE, _PLACE, _SCALES if shape.kind else 0]
        used = buffer[: size * sum(columns)]
        self._tiles, self._sequences, self._places, self._scales = (
            part.view(shape.num_layers, shape.sequences, width)
            for part, width in zip(used.split([size * w for w in columns]), columns, strict=True)
        )
        device, heads = buffer.device, shape.num_kv_heads
        self._no_rows = torch.zeros(heads, dtype=torch.int32, device=device)
        self._spare_tail = torch.zeros(
            1, 2, heads, 1, shape.head_dim, dtype=shape.dtype, device=device
        )
        self._held: list[Tensor] = []

    def describe(self, groups: Sequence[StepGroup]) -> list[int]:
        """What is to be copied into the buffer: [shape.numbers] numbers.

        Sequences are numbered group by group. What is addressed is kept alive until the next
        call, or ``forget``. Raises: ShapeError: a kernel reads and writes by address, and would
        take whatever else it were handed for these.
        """
        from kvkeep_kernels._triton import softmax, work_list
        from kvkeep_kernels._triton.processors import addressable

        shape = self.shape
        block = softmax.tile_shape(shape.head_dim, shape.dtype, shape.kind).block_m_max
        most = _members_max(block, shape.group_size)
        tails = [tail for group in groups for tail in group.tails]
        for tail in tails:
            self._check("tail", tail.shape[2], tail.shape[4], tail.dtype, tail.device)
            if addressable(tail) is not tail:
                raise ShapeError("tail", (tail.data_ptr(), tail.stride()), "rows of 16 bytes")
        spare = shape.sequences - len(tails)
        tiles: list[int] = []
        sequences: list[int] = []
        places: list[int] = []
        scales: list[int] = []
        self._held = list(tails)
        no_rows = self._no_rows.data_ptr()
        for layer in range(shape.num_layers):
            first = tile = 0
            for group in groups:
                rows = group.layers[layer]
                device = rows.k.device
                self._check("context", rows.num_kv_heads, rows.head_dim, rows.dtype, device)
                if kind_of(rows) != shape.kind:
                    raise ShapeError("context.kind", kind_of(rows), shape.kind)
                check_bounds(rows, shape.bounds[layer])
                found = work_list.describe(rows)
                self._held += found.held
                for cut in range(0, len(group.tails), most):
                    members = group.tails[cut : cut + most]
                    tiles += [*found.tile, first, len(members)]
                    scales += found.scales
                    places += found.place
                    for tail in members:
                        sequences += [*_tail_columns(tail, layer), 0, tile]
                    first, tile = first + len(members), tile + 1
            for _ in range(shape.sequences - tile):
                tiles += [0, 0, 0, 0, no_rows, no_rows, 0, 0]
                scales += [0] * len(found.scales)
                places += [0, 0]
            # Where a sequence is missing a tile is, and the last one has no rows.
            for _ in range(spare):
                sequences += [*_tail_columns(self._spare_tail, 0), 0, shape.sequences - 1]
        numbers = tiles + sequences + places + scales
        return numbers + [0] * (shape.numbers - len(numbers))

    def _check(
        self, name: str, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = self.shape
        expected = (shape.num_kv_heads, shape.head_dim, shape.dtype, self._tiles.device)
        found = (heads, head_dim, dtype, device)
        if found != expected:
            raise ShapeError(name, found, expected)

    def forget(self) -> None:
        """Let go of what was addressed; nothing may run before the next ``describe``."""
        self._held = []

    def set_tail_tokens(self, tokens: Tensor) -> None:
        """How long every tail is, the new token's row counted: [sequences] int64, on the device."""
        self._sequences[:, :, 6] = tokens

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the newest row of every tail: k, v [sequences, num_kv_heads, head_dim]."""
        from kvkeep_kernels._triton.append import append

        append(k, v, self._sequences[layer])

    def attend(self, layer: int, q: Tensor, *, scale: float) -> Tensor:
        """Attend one new token of every sequence: as ``attention.ragged_decode_batch``.

        Shapes: q [sequences, num_q_heads, head_dim]. Launches asynchronously on the current
        stream; neither launches nor buffers depend on lengths.
        """
        from kvkeep_kernels._triton import decode, work_list

        shape = self.shape
        tables = work_list.DecodeTables(
            self._tiles[layer],
            self._sequences[layer],
            self._scales[layer],
            self._places[layer],
            shape.kind,
            shape.num_kv_heads,
            shape.tile_rows,
            (),
        )
        return decode.launch(q, tables, scale=scale, bounds=shape.bounds[layer])


def _members_max(block_m_max: int, group_size: int) -> int:
    return max(1, block_m_max // group_size)


def _tail_columns(tail: Tensor, layer: int) -> list[int]:
    """Addresses of K and V of one layer, then strides of K and V by head and by token."""
    width = tail.element_size()
    k = tail.data_ptr() + layer * tail.stride(0) * width
    by_head, by_token = tail.stride(2), tail.stride(3)
    return [k, k + tail.stride(1) * width, by_head, by_head, by_token, by_token]
