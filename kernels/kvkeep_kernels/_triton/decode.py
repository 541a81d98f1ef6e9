# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""One token of every sequence: split-K by each head's own length, contexts shared by members.

Three launches: ``plan_items`` cuts the work, ``attend_items`` writes a partial state per item,
``merge_items`` joins each query row's items by log-sum-exp. Grids and scratch depend on the
number of tiles and sequences alone, and lengths are read on the device, so nothing waits for
the host and the launches can be captured in a graph; ``DecodeTables.tail_tokens`` may be
advanced between replays.

Source: FlashDecoding split-K; shared prefixes as query rows of one tile after Hydragen and
FlashInfer's cascade.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep_kernels._triton.codes import fold_codes, mean_products
from kvkeep_kernels._triton.processors import addressable
from kvkeep_kernels._triton.softmax import LOG2_E, NO_PEAK, fold_run, tile_shape
from kvkeep_kernels._triton.work_list import (
    PLACE_COLUMNS,
    RUN_COLUMNS,
    SCALE_COLUMNS,
    SEQUENCE_COLUMNS,
    TILE_COLUMNS,
    DecodeTables,
    plan,
)
from kvkeep_kernels.layout import UNBOUNDED, LogitBounds

MERGED_ITEMS = 16
"""Items whose states one merging program holds at a time."""


def launch(
    q: Tensor, tables: DecodeTables, *, scale: float, bounds: LogitBounds = UNBOUNDED
) -> Tensor:
    """Attend one new token of every sequence of the tables.

    Shapes: q [num_sequences, num_q_heads, head_dim], in the tables' order. Returns q's shape and
        dtype. Modifies: nothing. Launches asynchronously on the current stream.
    """
    q = addressable(q.contiguous())
    num_sequences, num_q_heads, head_dim = q.shape
    shape = tile_shape(head_dim, q.dtype, tables.kind)
    sizes = {
        "HEADS": tables.num_kv_heads,
        "GROUP": num_q_heads // tables.num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": tables.block_m,
    }
    with torch.cuda.device_of(q):
        work = plan(tables, q.element_size(), shape.block_n)
        states = (work.num_slots, tables.block_m)
        part_out = torch.empty(*states, head_dim, dtype=torch.float32, device=q.device)
        part_peak = torch.empty(states, dtype=torch.float32, device=q.device)
        part_mass = torch.empty_like(part_peak)
        out = torch.empty_like(q)
        attend_items[(work.num_slots,)](
            *(q, tables.tiles, tables.scales, work.runs, work.items),
            *(part_out, part_peak, part_mass),
            *(len(tables.tiles), work.num_slots, scale * LOG2_E),
            *((tables.sequences, tables.places) if bounds.window else (None, None)),
            **sizes,
            KIND=tables.kind,
            WINDOW=bounds.window or 0,
            SOFT_CAP=bounds.soft_cap or 0.0,
            BLOCK_N=shape.block_n,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        merge_items[(num_sequences, num_q_heads)](
            *(tables.tiles, tables.sequences, work.indptr, part_out, part_peak, part_mass, out),
            len(tables.tiles),
            **sizes,
            BLOCK_I=MERGED_ITEMS,
        )
    return out


@triton.jit(do_not_specialize=["num_tiles", "num_slots"])
def attend_items(
    q,
    tiles,
    scales,
    runs,
    items,
    part_out,
    part_peak,
    part_mass,
    num_tiles,
    num_slots,
    scale_log2,
    sequences,
    places,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """One program attends all query rows of one item to its keys, and stores their state.

    Shapes: q [num_sequences, HEADS * GROUP, HEAD_DIM]; tiles, scales as in ``DecodeTables``, read
    with a KIND of codes only; sequences, places likewise, read with a WINDOW of tokens only (0: all
    are seen); part_out [num_slots, BLOCK_M, HEAD_DIM], part_peak, part_mass [num_slots, BLOCK_M]
    fp32, written for items with work, valid rows only.
    """
    item = tl.program_id(0).to(tl.int64)
    rows = tl.load(items + 2 * num_slots + item)
    if rows == 0:
        return
    run = tl.load(items + item)
    first_row = tl.load(items + num_slots + item).to(tl.int64)
    entry = runs + run * RUN_COLUMNS
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    is_row = row < tl.load(entry + 5) * GROUP
    is_kept = is_row[:, None] & (column < HEAD_DIM)[None, :]
    sequence = tl.load(entry + 4) + row // GROUP
    q_row = sequence * (HEADS * GROUP) + (run % HEADS) * GROUP + row % GROUP
    q_rows = tl.load(q + q_row[:, None] * HEAD_DIM + column[None, :], mask=is_kept, other=0.0)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    window = None
    if WINDOW != 0:
        peak = tl.full((BLOCK_M,), NO_PEAK, tl.float32)
        tail_at = sequences + sequence * SEQUENCE_COLUMNS + 6
        # Positions are counted from the tail's first; its last row is the query's own.
        first_seen = tl.load(tail_at, mask=is_row, other=0) - WINDOW
        window = _window(tiles, places, run, first_row, first_seen, run < num_tiles * HEADS, HEADS)
    # Not "and": this decides what is compiled, and the next what is run.
    if KIND is not None:  # noqa: SIM102
        if run < num_tiles * HEADS:
            peak, mass, acc = _fold_quantized(
                q_rows,
                peak,
                mass,
                acc,
                tiles,
                scales,
                entry,
                run,
                first_row,
                rows,
                scale_log2,
                window,
                HEADS=HEADS,
                KIND=KIND,
                SOFT_CAP=SOFT_CAP,
                HEAD_DIM=HEAD_DIM,
                BLOCK_D=BLOCK_D,
                BLOCK_N=BLOCK_N,
            )
            # Nothing is left of this item; what follows is for tails.
            rows = 0
    # The host hands in aligned rows only (``addressable``).
    unit: tl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth
    k_stride = tl.multiple_of(tl.load(entry + 2), unit)
    v_stride = tl.multiple_of(tl.load(entry + 3), unit)
    k = tl.multiple_of(tl.load(entry).to(q.dtype), 16) + first_row * k_stride
    v = tl.multiple_of(tl.load(entry + 1).to(q.dtype), 16) + first_row * v_stride
    peak, mass, acc = fold_run(
        q_rows,
        peak,
        mass,
        acc,
        k,
        v,
        k_stride,
        v_stride,
        rows,
        row,
        scale_log2,
        window,
        IS_CAUSAL=False,
        SOFT_CAP=SOFT_CAP,
        HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N,
    )
    target = item * BLOCK_M + row
    tl.store(part_peak + target, peak, mask=is_row)
    tl.store(part_mass + target, mass, mask=is_row)
    tl.store(part_out + target[:, None] * HEAD_DIM + column[None, :], acc, mask=is_kept)


@triton.jit
def _window(tiles, places, run, first_row, first_seen, is_context, HEADS: tl.constexpr):
    """What ``softmax.in_window`` takes for rows ``first_row`` and on of a run."""
    tile = run // HEADS
    place = places + tile * PLACE_COLUMNS
    starts = tl.load(tiles + tile * TILE_COLUMNS + 4, mask=is_context, other=0)
    starts = starts.to(tl.pointer_type(tl.int32))
    at = tl.load(starts + run % HEADS, mask=is_context, other=0) + first_row
    positions = tl.load(place, mask=is_context, other=0).to(tl.pointer_type(tl.int32)) + at
    end = tl.load(place + 1, mask=is_context, other=0)
    return positions, is_context, tl.where(is_context, -end, first_row), first_seen


@triton.jit
def _fold_quantized(
    q_rows,
    peak,
    mass,
    acc,
    tiles,
    scales,
    entry,
    run,
    first_row,
    rows,
    scale_log2,
    window,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = run // HEADS
    head = run % HEADS
    starts = tl.load(tiles + tile * TILE_COLUMNS + 4).to(tl.pointer_type(tl.int32))
    at = tl.load(starts + head) + first_row
    width: tl.constexpr = HEAD_DIM // 2 if KIND == "int4" else HEAD_DIM
    unit: tl.constexpr = 16 if width % 16 == 0 else 1
    codes = tl.pointer_type(tl.uint8)
    half = tl.pointer_type(tl.float16)
    halves = scales + tile * SCALE_COLUMNS
    k_zero = None
    v_zero = None
    if KIND != "fp8":
        k_zero = tl.load(halves + 1).to(half) + at
        v_zero = tl.load(halves + 3).to(half) + at
    mean = None
    if KIND == "int4":
        k_mean = tl.load(halves + 4).to(half) + head * HEAD_DIM
        mean = mean_products(q_rows, k_mean, HEAD_DIM, BLOCK_D)
    peak, mass, acc = fold_codes(
        q_rows,
        peak,
        mass,
        acc,
        tl.multiple_of(tl.load(entry).to(codes), unit) + first_row * width,
        tl.multiple_of(tl.load(entry + 1).to(codes), unit) + first_row * width,
        tl.load(halves).to(half) + at,
        k_zero,
        tl.load(halves + 2).to(half) + at,
        v_zero,
        rows,
        scale_log2,
        window,
        mean,
        KIND=KIND,
        SOFT_CAP=SOFT_CAP,
        HEAD_DIM=HEAD_DIM,
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N,
    )
    return peak, mass, acc


@triton.jit(do_not_specialize=["num_tiles"])
def merge_items(
    tiles,
    sequences,
    indptr,
    part_out,
    part_peak,
    part_mass,
    out,
    num_tiles,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Join the items of one query row: one program covers one query head of one sequence.

    Shapes: as ``attend_items``; out [num_sequences, HEADS * GROUP, HEAD_DIM] in q's dtype.
    """
    sequence, q_head = tl.program_id(0), tl.program_id(1)
    head, group_row = q_head // GROUP, q_head % GROUP
    tile = tl.load(sequences + sequence * SEQUENCE_COLUMNS + 7).to(tl.int32)
    member = sequence - tl.load(tiles + tile * TILE_COLUMNS + 6).to(tl.int32)
    column = tl.arange(0, BLOCK_D)
    is_column = column < HEAD_DIM
    peak = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    # The tail first: it has a row, so the peak is finite before an empty context is met.
    for part in tl.static_range(2):
        owner = num_tiles + sequence if part == 0 else tile
        row = group_row if part == 0 else member * GROUP + group_row
        run = owner * HEADS + head
        end = tl.load(indptr + run + 1)
        for first in range(tl.load(indptr + run), end, BLOCK_I):
            item = first + tl.arange(0, BLOCK_I)
            is_item = item < end
            source = item.to(tl.int64) * BLOCK_M + row
            peaks = tl.load(part_peak + source, mask=is_item, other=float("-inf"))
            masses = tl.load(part_mass + source, mask=is_item, other=0.0)
            outs = tl.load(
                part_out + source[:, None] * HEAD_DIM + column[None, :],
                mask=is_item[:, None] & is_column[None, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
            weights = tl.exp2(peaks - new_peak)
            decay = tl.exp2(peak - new_peak)
            mass = mass * decay + tl.sum(masses * weights, axis=0)
            acc = acc * decay + tl.sum(outs * weights[:, None], axis=0)
            peak = new_peak
    target = out + (sequence.to(tl.int64) * HEADS * GROUP + q_head) * HEAD_DIM + column
    tl.store(target, (acc / mass).to(out.dtype.element_ty), mask=is_column)
