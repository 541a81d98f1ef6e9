# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""The work list of a decode step: which rows of which buffers each program attends.

- A *tile* is some members of one context, whose query rows share every read of its K and V.
- A *run* is one head's rows: of one tile's context, or of one sequence's tail.
- An *item* is a part of a run, the work of one program. Runs are cut at one length, chosen from
  all lengths together, so that the items fill the GPU once however the lengths differ.

The host writes addresses; lengths stay on the device, which cuts the runs itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep_kernels._triton.processors import addressable, processor_count
from kvkeep_kernels._triton.softmax import tile_shape
from kvkeep_kernels.layout import CodeKind, ContextRows, DecodeBatch, QuantizedKV

ITEMS_PER_PROCESSOR = 2

# Columns of the int64 tables. tiles: k, v (addresses), k and v row stride (elements), start,
# length (addresses), first sequence, members. sequences: k, v (addresses), k and v head stride,
# k and v token stride, tail tokens, tile. runs: k, v (addresses of row 0), k and v row stride,
# first sequence, members. scales, of quantised tiles: k scale, k zero, v scale, v zero, k mean
# (addresses of row 0; 0 for what a kind has not); the row strides of such tiles are in bytes.
# places, for windows: positions (address of row 0; 0 for none), the position of a tail's first row.
TILE_COLUMNS = tl.constexpr(8)
SEQUENCE_COLUMNS = tl.constexpr(8)
RUN_COLUMNS = tl.constexpr(6)
SCALE_COLUMNS = tl.constexpr(5)
PLACE_COLUMNS = tl.constexpr(2)
_TAIL_TOKENS_COLUMN = 6


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """Where a batch's rows are, as its kernels read it.

    Shapes: tiles [num_tiles, 8], sequences [num_sequences, 8], scales [num_tiles, 5], or no rows
    of these without quantised contexts, places [num_tiles, 2]: int64, on the batch's device.
    ``kind`` of the contexts' codes, None where those are not quantised. ``held`` keeps alive what
    the addresses point at.
    """

    tiles: Tensor
    sequences: Tensor
    scales: Tensor
    places: Tensor
    kind: CodeKind | None
    num_kv_heads: int
    block_m: int
    held: tuple[Tensor, ...]

    @property
    def tail_tokens(self) -> Tensor:
        """Rows of every sequence's tail [num_sequences], a view that may be written."""
        return self.sequences[:, _TAIL_TOKENS_COLUMN]


@dataclass(frozen=True, slots=True)
class WorkList:
    """Tensors that ``plan_items`` writes; shapes there. ``num_slots``: the most items."""

    runs: Tensor
    indptr: Tensor
    items: Tensor
    num_slots: int


def tabulate(batch: DecodeBatch, group_size: int) -> DecodeTables:
    """Write a batch's addresses and sizes into tables on its device.

    Contexts are all quantised to the same kind of codes, or none is.
    Modifies: nothing. One copy to the device, which the host does not wait for.
    """
    first = batch.groups[0].context
    kind = first.kind if isinstance(first, QuantizedKV) else None
    shape = tile_shape(first.head_dim, first.dtype, kind)
    members_max = max(1, shape.block_m_max // group_size)
    tiles: list[int] = []
    sequences: list[int] = []
    scales: list[int] = []
    places: list[int] = []
    held: list[Tensor] = []
    largest = num_tiles = num_sequences = 0
    for group in batch.groups:
        context = group.context
        described = describe(context)
        held += described.held
        for cut in range(0, len(group.tails), members_max):
            tails = group.tails[cut : cut + members_max]
            tiles += [*described.tile, num_sequences, len(tails)]
            scales += described.scales
            places += described.place
            for tail in tails:
                own_k, own_v = addressable(tail.k), addressable(tail.v)
                held += [own_k, own_v]
                sequences += [own_k.data_ptr(), own_v.data_ptr(), own_k.stride(0), own_v.stride(0)]
                sequences += [own_k.stride(1), own_v.stride(1), tail.tokens, num_tiles]
            num_sequences += len(tails)
            num_tiles += 1
            largest = max(largest, len(tails))
    table = torch.tensor(tiles + sequences + scales + places, dtype=torch.int64)
    if first.k.is_cuda:
        table = table.pin_memory().to(first.k.device, non_blocking=True)
    lengths = [len(part) for part in (tiles, sequences, scales, places)]
    of_tiles, of_sequences, of_scales, of_places = table.split(lengths)
    return DecodeTables(
        of_tiles.view(num_tiles, TILE_COLUMNS.value),
        of_sequences.view(num_sequences, SEQUENCE_COLUMNS.value),
        of_scales.view(-1, SCALE_COLUMNS.value),
        of_places.view(num_tiles, PLACE_COLUMNS.value),
        kind,
        first.num_kv_heads,
        max(16, triton.next_power_of_2(largest * group_size)),
        tuple(held),
    )


class Described(NamedTuple):
    """A context's columns: those of a tile but its members, of scales, and of its place."""

    tile: list[int]
    scales: list[int]
    place: list[int]
    held: list[Tensor]


def describe(context: ContextRows) -> Described:
    """What tables say of a context. The addresses are good while ``held`` is."""
    k, v = addressable(context.k), addressable(context.v)
    start, length = context.start.contiguous(), context.length.contiguous()
    halves = _halves(context)
    held = [k, v, start, length, *(half for half in halves if half is not None)]
    place = [0, 0]
    if context.placement is not None:
        place = [context.placement.positions.data_ptr(), context.placement.end]
        held.append(context.placement.positions)
    return Described(
        [k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), start.data_ptr(), length.data_ptr()],
        [0 if half is None else half.data_ptr() for half in halves],
        place,
        held,
    )


def _halves(context: ContextRows) -> tuple[Tensor | None, ...]:
    """The float16 parts of a quantised context, in the order of their columns."""
    if isinstance(context, QuantizedKV):
        rows = context
        return (rows.k_scale, rows.k_zero, rows.v_scale, rows.v_zero, rows.k_mean)
    return ()


def plan(tables: DecodeTables, element_bytes: int, block_n: int) -> WorkList:
    """Launch the cutting of a batch's runs, in multiples of ``block_n`` rows. No host sync."""
    heads, num_tiles, device = tables.num_kv_heads, len(tables.tiles), tables.tiles.device
    num_runs = (num_tiles + len(tables.sequences)) * heads
    num_slots = max(ITEMS_PER_PROCESSOR * processor_count(device), 2 * num_runs)
    work = WorkList(
        torch.empty(num_runs, RUN_COLUMNS.value, dtype=torch.int64, device=device),
        torch.empty(num_runs + 1, dtype=torch.int32, device=device),
        torch.empty(3, num_slots, dtype=torch.int32, device=device),
        num_slots,
    )
    plan_items[(num_runs,)](
        *(tables.tiles, tables.sequences, work.runs, work.indptr, work.items),
        *(num_tiles, num_runs, num_slots),
        HEADS=heads,
        CONTEXT_BYTES=1 if tables.kind else element_bytes,
        TAIL_BYTES=element_bytes,
        BLOCK_N=block_n,
        RUNS=triton.next_power_of_2(num_runs),
        SLOTS=triton.next_power_of_2(num_slots),
    )
    return work


@triton.jit(do_not_specialize=["num_tiles", "num_runs", "num_slots"])
def plan_items(
    tiles,
    sequences,
    runs,
    indptr,
    items,
    num_tiles,
    num_runs,
    num_slots,
    HEADS: tl.constexpr,
    CONTEXT_BYTES: tl.constexpr,
    TAIL_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Write the work list. One program covers one run: its items and where its rows are.

    Writes: runs [num_runs, 6]; indptr [num_runs + 1], each run's first item; items
    [3, num_slots], each item's run, first row in it, and rows, 0 for a slot without work.
    """
    run = tl.program_id(0)
    every = tl.arange(0, RUNS)
    owner = every // HEADS
    is_context = owner < num_tiles
    is_tail = (owner >= num_tiles) & (every < num_runs)
    length_at = tl.load(tiles + owner * TILE_COLUMNS + 5, mask=is_context, other=0)
    length_at = length_at.to(tl.pointer_type(tl.int32)) + every % HEADS
    tail_at = sequences + (owner - num_tiles) * SEQUENCE_COLUMNS + 6
    lengths = tl.load(length_at, mask=is_context, other=0).to(tl.int64)
    lengths += tl.load(tail_at, mask=is_tail, other=0)
    # Every run has at most one item that is not full, hence this many full ones are left.
    fair = tl.cdiv(tl.sum(lengths), (num_slots - num_runs).to(tl.int64))
    item_rows = tl.cdiv(tl.maximum(fair, 1), BLOCK_N) * BLOCK_N
    counts = tl.cdiv(lengths, item_rows)
    first_item = tl.sum(tl.where(every < run, counts, 0))
    num_items = tl.sum(tl.where(every == run, counts, 0))
    length = tl.sum(tl.where(every == run, lengths, 0))
    tl.store(indptr + run, first_item.to(tl.int32))
    slot = tl.arange(0, SLOTS)
    first_row = (slot - first_item) * item_rows
    is_own = (slot >= first_item) & (slot < first_item + num_items)
    tl.store(items + slot, run, mask=is_own)
    tl.store(items + num_slots + slot, first_row.to(tl.int32), mask=is_own)
    rows = tl.minimum(length - first_row, item_rows)
    tl.store(items + 2 * num_slots + slot, rows.to(tl.int32), mask=is_own)
    if run == num_runs - 1:
        end = first_item + num_items
        tl.store(indptr + num_runs, end.to(tl.int32))
        is_idle = (slot >= end) & (slot < num_slots)
        tl.store(items + 2 * num_slots + slot, 0, mask=is_idle)
    _describe_run(tiles, sequences, runs, run, num_tiles, HEADS, CONTEXT_BYTES, TAIL_BYTES)


@triton.jit
def _describe_run(
    tiles,
    sequences,
    runs,
    run,
    num_tiles,
    HEADS: tl.constexpr,
    CONTEXT_BYTES: tl.constexpr,
    TAIL_BYTES: tl.constexpr,
):
    owner = run // HEADS
    head = run % HEADS
    target = runs + run * RUN_COLUMNS
    if owner < num_tiles:
        tile = tiles + owner * TILE_COLUMNS
        k_stride, v_stride = tl.load(tile + 2), tl.load(tile + 3)
        start = tl.load(tl.load(tile + 4).to(tl.pointer_type(tl.int32)) + head).to(tl.int64)
        tl.store(target, tl.load(tile) + start * k_stride * CONTEXT_BYTES)
        tl.store(target + 1, tl.load(tile + 1) + start * v_stride * CONTEXT_BYTES)
        tl.store(target + 2, k_stride)
        tl.store(target + 3, v_stride)
        tl.store(target + 4, tl.load(tile + 6))
        tl.store(target + 5, tl.load(tile + 7))
    else:
        sequence = sequences + (owner - num_tiles) * SEQUENCE_COLUMNS
        tl.store(target, tl.load(sequence) + head * tl.load(sequence + 2) * TAIL_BYTES)
        tl.store(target + 1, tl.load(sequence + 1) + head * tl.load(sequence + 3) * TAIL_BYTES)
        tl.store(target + 2, tl.load(sequence + 4))
        tl.store(target + 3, tl.load(sequence + 5))
        tl.store(target + 4, owner - num_tiles)
        tl.store(target + 5, 1)
