# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""A question's new tokens: the whole context visible, the tail causally.

The query rows of one KV head are its tokens times its group, token by token, so that a tile
reads K and V once for the whole group. A short question makes few tiles, so each head's context
is also cut into equal shares of its own length; the tail goes with the last share.

Source: FlashAttention-2; FlashDecoding for the shares and their merge.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep_kernels._triton.codes import fold_codes, mean_products
from kvkeep_kernels._triton.processors import addressable, processor_count
from kvkeep_kernels._triton.softmax import LOG2_E, NO_PEAK, fold_run, tile_shape
from kvkeep_kernels.layout import UNBOUNDED, ContextRows, DenseKV, LogitBounds, QuantizedKV

PROGRAMS_PER_PROCESSOR = 2
MERGED_ROWS = 16
"""Query rows that one merging program covers."""


def launch(
    q: Tensor,
    context: ContextRows,
    tail: DenseKV,
    *,
    scale: float,
    bounds: LogitBounds = UNBOUNDED,
) -> Tensor:
    """Attend new tokens of one sequence.

    Shapes: q [num_q_heads, tokens, head_dim]; tail.k [num_kv_heads, tail_tokens, head_dim], the
        new tokens' rows last. Returns q's shape and dtype.
    Modifies: nothing. Launches asynchronously on the current stream; no host sync.
    """
    q = addressable(q.contiguous())
    k, v, own_k, own_v = map(addressable, (context.k, context.v, tail.k, tail.v))
    num_q_heads, tokens, head_dim = q.shape
    heads, rows = context.num_kv_heads, num_q_heads * tokens
    kind = context.kind if isinstance(context, QuantizedKV) else None
    shape = tile_shape(head_dim, q.dtype, kind)
    group = num_q_heads // heads
    block_m = min(shape.block_m_max, max(16, triton.next_power_of_2(tokens * group)))
    tiles = triton.cdiv(tokens * group, block_m)
    # The shares of the average head are a key block or more.
    useful = triton.cdiv(len(k), heads * shape.block_n)
    to_fill = PROGRAMS_PER_PROCESSOR * processor_count(q.device) // (tiles * heads)
    shares = max(1, min(useful, to_fill))
    widths = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    place = context.placement if bounds.window else None
    with torch.cuda.device_of(q):
        part_out = torch.empty(shares, rows, head_dim, dtype=torch.float32, device=q.device)
        part_peak = torch.empty(shares, rows, dtype=torch.float32, device=q.device)
        part_mass = torch.empty_like(part_peak)
        out = torch.empty_like(q)
        attend_shares[(tiles, heads, shares)](
            *(q, k, v, context.start.contiguous(), context.length.contiguous()),
            *(*_halves(context), own_k, own_v),
            *(part_out, part_peak, part_mass, tokens, tail.tokens, scale * LOG2_E),
            *(k.stride(0), v.stride(0), own_k.stride(0), own_v.stride(0)),
            *(own_k.stride(1), own_v.stride(1)),
            *((None, None) if place is None else (place.positions, place.end)),
            **widths,
            WINDOW=bounds.window or 0,
            SOFT_CAP=bounds.soft_cap or 0.0,
            GROUP=group,
            BLOCK_M=block_m,
            BLOCK_N=shape.block_n,
            KIND=kind,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        merge_shares[(triton.cdiv(rows, MERGED_ROWS),)](
            *(part_out, part_peak, part_mass, out, rows, shares),
            **widths,
            BLOCK_R=MERGED_ROWS,
        )
    return out


def _halves(context: ContextRows) -> tuple[Tensor | None, ...]:
    """The float16 arguments of a quantised context, in their order."""
    if isinstance(context, QuantizedKV):
        rows = context
        return (rows.k_scale, rows.k_zero, rows.v_scale, rows.v_zero, rows.k_mean)
    return (None,) * 5


@triton.jit(do_not_specialize=["tokens", "tail_tokens", "end"])
def attend_shares(
    q,
    context_k,
    context_v,
    start,
    length,
    k_scale,
    k_zero,
    v_scale,
    v_zero,
    k_mean,
    tail_k,
    tail_v,
    part_out,
    part_peak,
    part_mass,
    tokens,
    tail_tokens,
    scale_log2,
    k_stride,
    v_stride,
    tail_k_head_stride,
    tail_v_head_stride,
    tail_k_stride,
    tail_v_stride,
    positions,
    end,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """One program attends a tile of one head's query rows to one share of its context.

    Shapes: q [heads * GROUP, tokens, HEAD_DIM]; start, length [heads]; part_out [shares,
    heads * GROUP * tokens, HEAD_DIM], part_peak, part_mass [shares, heads * GROUP * tokens] fp32.
    The last share includes the tail. Strides are in elements. With a KIND of codes the context is
    quantised: its rows are packed bytes, with the float16 of each row beside them, and of int4 a
    k_mean [heads, HEAD_DIM]. A WINDOW of tokens, 0 for all, reads the positions of the context's
    rows, and the tail's first row is at position ``end``.
    """
    head, share = tl.program_id(1), tl.program_id(2)
    shares = tl.num_programs(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    is_row = token < tokens
    q_row = (head * GROUP + row % GROUP).to(tl.int64) * tokens + token
    column = tl.arange(0, BLOCK_D)
    is_kept = is_row[:, None] & (column < HEAD_DIM)[None, :]
    q_rows = tl.load(q + q_row[:, None] * HEAD_DIM + column[None, :], mask=is_kept, other=0.0)
    seen = tail_tokens - tokens + token + 1
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if WINDOW != 0:
        peak = tl.full((BLOCK_M,), NO_PEAK, tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    rows = tl.load(length + head).to(tl.int64)
    first = rows * share // shares
    at = tl.load(start + head) + first
    share_rows = (rows * (share + 1) // shares - first).to(tl.int32)
    window = None
    if WINDOW != 0:
        window = (positions + at, True, -end, seen - WINDOW)
    if KIND is None:
        peak, mass, acc = fold_run(
            q_rows,
            peak,
            mass,
            acc,
            context_k + at * k_stride,
            context_v + at * v_stride,
            k_stride,
            v_stride,
            share_rows,
            seen,
            scale_log2,
            window,
            IS_CAUSAL=False,
            SOFT_CAP=SOFT_CAP,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
        )
    else:
        k_zeros = None
        v_zeros = None
        if KIND != "fp8":
            k_zeros = k_zero + at
            v_zeros = v_zero + at
        mean = None
        if KIND == "int4":
            mean = mean_products(q_rows, k_mean + head * HEAD_DIM, HEAD_DIM, BLOCK_D)
        peak, mass, acc = fold_codes(
            q_rows,
            peak,
            mass,
            acc,
            context_k + at * k_stride,
            context_v + at * v_stride,
            k_scale + at,
            k_zeros,
            v_scale + at,
            v_zeros,
            share_rows,
            scale_log2,
            window,
            mean,
            KIND=KIND,
            SOFT_CAP=SOFT_CAP,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
        )
    if share == shares - 1:
        last_token = tl.minimum(((tl.program_id(0) + 1) * BLOCK_M - 1) // GROUP, tokens - 1)
        own_head = head.to(tl.int64)
        if WINDOW != 0:
            window = (positions, False, 0, seen - WINDOW)
        peak, mass, acc = fold_run(
            q_rows,
            peak,
            mass,
            acc,
            tail_k + own_head * tail_k_head_stride,
            tail_v + own_head * tail_v_head_stride,
            tail_k_stride,
            tail_v_stride,
            tail_tokens - tokens + last_token + 1,
            seen,
            scale_log2,
            window,
            IS_CAUSAL=True,
            SOFT_CAP=SOFT_CAP,
            HEAD_DIM=HEAD_DIM,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
        )
    target = share.to(tl.int64) * tl.num_programs(1) * GROUP * tokens + q_row
    tl.store(part_peak + target, peak, mask=is_row)
    tl.store(part_mass + target, mass, mask=is_row)
    tl.store(part_out + target[:, None] * HEAD_DIM + column[None, :], acc, mask=is_kept)


@triton.jit(do_not_specialize=["rows", "shares"])
def merge_shares(
    part_out,
    part_peak,
    part_mass,
    out,
    rows,
    shares,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Join the shares of BLOCK_R query rows: what one program covers.

    Shapes: as ``attend_shares``; out [rows, HEAD_DIM] in q's dtype.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < rows
    column = tl.arange(0, BLOCK_D)
    is_kept = is_row[:, None] & (column < HEAD_DIM)[None, :]
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    # The last share first: it holds the tail, so the peak is finite before an empty one is met.
    for behind in range(shares):
        source = (shares - 1 - behind).to(tl.int64) * rows + row
        part = tl.load(part_peak + source, mask=is_row, other=0.0)
        new_peak = tl.maximum(peak, part)
        weight = tl.exp2(part - new_peak)
        decay = tl.exp2(peak - new_peak)
        mass = mass * decay + weight * tl.load(part_mass + source, mask=is_row, other=1.0)
        part_rows = source[:, None] * HEAD_DIM + column[None, :]
        outs = tl.load(part_out + part_rows, mask=is_kept, other=0.0)
        acc = acc * decay[:, None] + outs * weight[:, None]
        peak = new_peak
    target = out + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(target, (acc / mass[:, None]).to(out.dtype.element_ty), mask=is_kept)
