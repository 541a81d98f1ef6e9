# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""Triton kernels of ``kvkeep_kernels.scoring``: row log-sum-exp and column reduction.

Both are the first half of a flash-attention forward. ``row_lse`` owns a tile of query rows and
streams keys; ``column_reduce`` is its transpose, owns a tile of keys and streams query rows, so
neither forms the [rows, columns] matrix. The owned tile is the left operand of the dot, hence
every reduction runs along the axis that one warp holds.

The launchers trust what they are given, as the public functions have checked it. They launch on
the current stream and never wait for the device.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep_kernels._triton.processors import addressable


class TileShape(NamedTuple):
    """How one program is shaped: rows it owns, rows it streams per step, warps and stages."""

    owned: int
    streamed: int
    num_warps: int
    num_stages: int


def tile_shape(head_dim: int, dtype: torch.dtype) -> TileShape:
    """The shipped configuration; none of them spills on any target that is compiled for."""
    if dtype == torch.float32:
        # Without matrix instructions a product is unrolled per thread: few rows, many threads.
        return TileShape(32, 16, 8, 1)
    # Few rows each: one slice of a repeat input must still give every processor a program.
    if head_dim > 128:
        return TileShape(64, 32, 4, 2)
    return TileShape(64, 64, 4, 3)


def row_lse(
    q: Tensor, k_prefix: Tensor, k_chunk: Tensor, k_repeat: Tensor, *, scale: float
) -> Tensor:
    """As ``scoring.row_lse``, one launch."""
    num_q_heads, rows, head_dim = q.shape
    num_kv_heads = k_chunk.shape[0]
    group_size = num_q_heads // num_kv_heads
    lse = torch.empty(num_q_heads, rows, dtype=torch.float32, device=q.device)
    q, k_prefix, k_chunk, k_repeat = map(addressable, (q, k_prefix, k_chunk, k_repeat))
    tile = tile_shape(head_dim, q.dtype)
    grid = (triton.cdiv(rows * group_size, tile.owned), num_kv_heads)
    with torch.cuda.device_of(q):
        row_lse_kernel[grid](
            *(q, k_prefix, k_chunk, k_repeat, lse),
            *(*_strides(q), *_strides(k_prefix), *_strides(k_chunk), *_strides(k_repeat)),
            *(rows, group_size),
            *(k_prefix.shape[1], k_chunk.shape[1], k_repeat.shape[1], scale),
            HEAD_DIM=head_dim,
            BLOCK_DIM=triton.next_power_of_2(head_dim),
            BLOCK_ROWS=tile.owned,
            BLOCK_KEYS=tile.streamed,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return lse


def column_reduce(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    first_query: Tensor | None,
    last_query: Tensor | None,
    op: Literal["max", "logsum"],
    *,
    scale: float,
    log_factor: Tensor | None = None,
) -> Tensor:
    """As ``scoring.column_reduce``, one launch."""
    num_q_heads, rows, head_dim = q.shape
    num_kv_heads, columns, _ = k.shape
    out = torch.empty(num_kv_heads, columns, dtype=torch.float32, device=q.device)
    if first_query is not None or last_query is not None:
        first_query = _bounds(first_query, 0, q, k)
        last_query = _bounds(last_query, rows, q, k)
    if log_factor is not None:
        log_factor = log_factor.contiguous()
    q, k = addressable(q), addressable(k)
    tile = tile_shape(head_dim, q.dtype)
    grid = (triton.cdiv(columns, tile.owned), num_kv_heads)
    with torch.cuda.device_of(q):
        column_reduce_kernel[grid](
            *(q, k, lse.float().contiguous(), first_query, last_query, log_factor, out),
            *(*_strides(q), *_strides(k)),
            *(rows, columns, num_q_heads // num_kv_heads, scale),
            IS_LOGSUM=op == "logsum",
            HEAD_DIM=head_dim,
            BLOCK_DIM=triton.next_power_of_2(head_dim),
            BLOCK_COLUMNS=tile.owned,
            BLOCK_ROWS=tile.streamed,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


def _bounds(given: Tensor | None, default: int, q: Tensor, k: Tensor) -> Tensor:
    """A window's bound of every column, within the rows there are."""
    rows, columns = q.shape[1], k.shape[1]
    if given is None:
        return torch.full((columns,), default, dtype=torch.int32, device=q.device)
    return given.clamp(0, rows).to(torch.int32).contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


@triton.jit
def column_reduce_kernel(
    q,  # [num_q_heads, rows, HEAD_DIM]
    k,  # [num_kv_heads, columns, HEAD_DIM]
    lse,  # [num_q_heads, rows] fp32
    first_query,  # [columns] int32 within 0 and rows, or None: every column sees every row
    last_query,  # [columns] int32 likewise, None together
    log_factor,  # [num_q_heads, columns] fp32 added to every logarithm, or None
    out,  # [num_kv_heads, columns] fp32
    q_head_stride,
    q_row_stride,
    k_head_stride,
    k_row_stride,
    rows,
    columns,
    group_size,
    scale,
    IS_LOGSUM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program reduces BLOCK_COLUMNS keys of one KV head over the rows of its whole group."""
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < columns
    dim = tl.arange(0, BLOCK_DIM)
    keys = tl.load(
        k + head * k_head_stride + column.to(tl.int64)[:, None] * k_row_stride + dim[None, :],
        mask=is_column[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    first_tile = 0
    last_row = rows
    if first_query is not None:
        first = tl.load(first_query + column, mask=is_column, other=rows)
        last = tl.load(last_query + column, mask=is_column, other=0)
        span = tl.maximum(last - first, 0).to(tl.uint32)
        first_tile = tl.min(first, axis=0) // BLOCK_ROWS
        last_row = tl.max(last, axis=0)
    end_tile = (last_row + BLOCK_ROWS - 1) // BLOCK_ROWS

    # One flat loop over (group member, tile of rows), so that its loads stay pipelined from one
    # member to the next.
    group_peak = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    peak = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
    mass = tl.full([BLOCK_COLUMNS], 0.0, tl.float32)
    tile_peak = tl.full([BLOCK_COLUMNS, BLOCK_ROWS], float("-inf"), tl.float32)
    row_of_tile = tl.arange(0, BLOCK_ROWS)
    offset = row_of_tile[None, :] * q_row_stride + dim[:, None]
    q_head = head * group_size
    tile = first_tile
    for _ in range(group_size * tl.maximum(end_tile - first_tile, 0)):
        first_row = tile * BLOCK_ROWS
        row = first_row + row_of_tile
        is_row = row < rows
        queries = tl.load(
            q + (q_head * q_head_stride + first_row.to(tl.int64) * q_row_stride) + offset,
            mask=is_row[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        # A row that does not exist has an infinite norm, so its weights vanish.
        norm = tl.load(lse + q_head * rows + row, mask=is_row, other=float("inf"))
        x = tl.dot(keys, queries, input_precision="ieee") * scale - norm[None, :]
        if log_factor is not None:
            factor = tl.load(log_factor + q_head * columns + column, mask=is_column, other=0.0)
            x += factor[:, None]
        if first_query is not None:
            # Rows before the first wrap around to large numbers: one comparison serves for two.
            is_seen = (row[None, :] - first[:, None]).to(tl.uint32) < span[:, None]
            x = tl.where(is_seen, x, float("-inf"))
        if IS_LOGSUM:
            new_peak = tl.maximum(peak, tl.max(x, axis=1))
            # Nothing seen yet: any finite reference gives sums of zero instead of NaN.
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            mass = mass * tl.exp(peak - reference)
            mass += tl.sum(tl.exp(x - reference[:, None]), axis=1)
            peak = new_peak
            if tile == end_tile - 1:
                # No sum means peak = -inf, which is the answer: log(0) is only kept quiet.
                summed = peak + tl.log(tl.where(mass == 0.0, 1.0, mass))
                group_peak = tl.maximum(group_peak, summed, propagate_nan=tl.PropagateNan.ALL)
                peak = tl.full([BLOCK_COLUMNS], float("-inf"), tl.float32)
                mass = tl.full([BLOCK_COLUMNS], 0.0, tl.float32)
        else:
            tile_peak = tl.maximum(tile_peak, x, propagate_nan=tl.PropagateNan.ALL)
        is_last = tile == end_tile - 1
        q_head += is_last.to(tl.int64)
        tile = tl.where(is_last, first_tile, tile + 1)
    if not IS_LOGSUM:
        # tl.max drops NaN, and a score that hides one would be kept or evicted in silence.
        is_nan = tl.max((tile_peak != tile_peak).to(tl.int32), axis=1) > 0
        group_peak = tl.where(is_nan, float("nan"), tl.max(tile_peak, axis=1))
    tl.store(out + head * columns + column, group_peak, mask=is_column)


@triton.jit
def row_lse_kernel(
    q,  # [num_q_heads, rows, HEAD_DIM]
    k_prefix,  # [num_kv_heads, prefix_tokens, HEAD_DIM]
    k_chunk,  # [num_kv_heads, chunk_tokens, HEAD_DIM]
    k_repeat,  # [num_kv_heads, repeat_tokens, HEAD_DIM]
    lse,  # [num_q_heads, rows] fp32
    q_head_stride,
    q_row_stride,
    prefix_head_stride,
    prefix_row_stride,
    chunk_head_stride,
    chunk_row_stride,
    repeat_head_stride,
    repeat_row_stride,
    rows,
    group_size,
    prefix_tokens,
    chunk_tokens,
    repeat_tokens,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """One program sums BLOCK_ROWS (row, group member) pairs of one KV head over all keys."""
    head = tl.program_id(1).to(tl.int64)
    # Members of a group stand side by side: a tile spans few rows, so its causal end is near.
    pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = pair // group_size
    q_head = head * group_size + pair % group_size
    is_row = row < rows
    dim = tl.arange(0, BLOCK_DIM)
    queries = tl.load(
        q + (q_head * q_head_stride + row.to(tl.int64) * q_row_stride)[:, None] + dim[None, :],
        mask=is_row[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    mass = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    nothing = tl.full([BLOCK_ROWS], 0, tl.int32)
    prefix = k_prefix + head * prefix_head_stride
    chunk = k_chunk + head * chunk_head_stride
    repeat = k_repeat + head * repeat_head_stride
    all_prefix, all_chunk = nothing + prefix_tokens, nothing + chunk_tokens
    # Row r is token (repeat_tokens - rows + r) of the repeat input and sees itself.
    causal = tl.minimum(repeat_tokens - rows + row + 1, repeat_tokens)
    peak, mass = _add_keys(
        queries,
        peak,
        mass,
        prefix,
        prefix_row_stride,
        all_prefix,
        scale,
        HEAD_DIM,
        BLOCK_DIM,
        BLOCK_KEYS,
    )
    peak, mass = _add_keys(
        queries,
        peak,
        mass,
        chunk,
        chunk_row_stride,
        all_chunk,
        scale,
        HEAD_DIM,
        BLOCK_DIM,
        BLOCK_KEYS,
    )
    peak, mass = _add_keys(
        queries,
        peak,
        mass,
        repeat,
        repeat_row_stride,
        causal,
        scale,
        HEAD_DIM,
        BLOCK_DIM,
        BLOCK_KEYS,
    )
    tl.store(lse + q_head * rows + row, peak + tl.log(mass), mask=is_row)


@triton.jit
def _add_keys(
    queries,  # [pairs, BLOCK_DIM]
    peak,  # [pairs] running maximum of the logits
    mass,  # [pairs] running sum of exp(logit - peak)
    k,  # [tokens, HEAD_DIM], one head
    k_row_stride,
    visible,  # [pairs] tokens that each pair sees
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Stream one piece of keys into the running log-sum-exp of every pair."""
    dim = tl.arange(0, BLOCK_DIM)
    token_of_tile = tl.arange(0, BLOCK_KEYS)
    offset = token_of_tile[None, :] * k_row_stride + dim[:, None]
    end = tl.max(visible, axis=0)
    for first in range(0, end, BLOCK_KEYS):
        token = first + token_of_tile
        keys = tl.load(
            k + tl.cast(first, tl.int64) * k_row_stride + offset,
            mask=(token < end)[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        )
        x = tl.dot(queries, keys, input_precision="ieee") * scale
        x = tl.where(token[None, :] < visible[:, None], x, float("-inf"))
        # Never -inf: the first key of every piece is visible to every pair.
        new_peak = tl.maximum(peak, tl.max(x, axis=1))
        mass = mass * tl.exp(peak - new_peak)
        mass += tl.sum(tl.exp(x - new_peak[:, None]), axis=1)
        peak = new_peak
    return peak, mass
