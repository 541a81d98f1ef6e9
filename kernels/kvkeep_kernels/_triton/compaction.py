# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""Triton kernel of ``kvkeep_kernels.compaction``: the gather of kept rows.

One launch per layer reads each kept row of K and V once and writes it once, head after head.
The launcher trusts its shapes: ``compaction.compact`` has checked them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep_kernels._triton.processors import addressable
from kvkeep_kernels.layout import DenseKV

ELEMENTS = 8192
"""Elements of K, and as many of V, that one program copies."""
NUM_WARPS = 8


def rows_per_program(head_dim: int) -> int:
    """Kept rows that one program copies."""
    block_dim: int = triton.next_power_of_2(head_dim)
    return ELEMENTS // block_dim


def gather(cache: DenseKV, positions: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the rows at ``positions``, head after head, each [rows, head_dim].

    Shapes: as ``compaction.compact``; positions and length on the cache's device, length
        adding up to the positions. Launches asynchronously on the current stream; no host sync.
    """
    num_kv_heads, tokens, head_dim = cache.k.shape
    rows = len(positions)
    k_out = torch.empty(rows, head_dim, dtype=cache.k.dtype, device=cache.k.device)
    v_out = torch.empty_like(k_out)
    if not rows:
        return k_out, v_out
    k, v = addressable(cache.k), addressable(cache.v)
    block_rows = rows_per_program(head_dim)
    with torch.cuda.device_of(k):
        gather_kernel[(triton.cdiv(rows, block_rows),)](
            *(k, v, positions.contiguous(), torch.cumsum(length, dim=0, dtype=torch.int32)),
            *(k_out, v_out, *k.stride()[:2], *v.stride()[:2], tokens, rows, num_kv_heads),
            HEADS=triton.next_power_of_2(num_kv_heads),
            HEAD_DIM=head_dim,
            BLOCK_DIM=triton.next_power_of_2(head_dim),
            BLOCK_ROWS=block_rows,
            num_warps=NUM_WARPS,
        )
    return k_out, v_out


@triton.jit
def gather_kernel(
    k,  # [num_kv_heads, tokens, HEAD_DIM]
    v,  # [num_kv_heads, tokens, HEAD_DIM]
    positions,  # [rows] int64
    end,  # [num_kv_heads] int32, one past each head's last output row
    k_out,  # [rows, HEAD_DIM]
    v_out,  # [rows, HEAD_DIM]
    k_head_stride,
    k_row_stride,
    v_head_stride,
    v_row_stride,
    tokens,
    rows,
    num_kv_heads,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program copies BLOCK_ROWS consecutive output rows, whichever heads they belong to."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    which = tl.arange(0, HEADS)
    ends = tl.load(end + which, mask=which < num_kv_heads, other=rows)
    # A row belongs to the head after all those that ended before it; heads may be empty.
    head = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1).to(tl.int64)
    position = tl.load(positions + row, mask=is_row, other=0)
    # A position outside the cache would copy foreign memory: its row becomes NaN instead.
    is_known = is_row & (position >= 0) & (position < tokens)
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = (dim < HEAD_DIM)[None, :]
    mask = is_row[:, None] & is_dim
    known = is_known[:, None] & is_dim
    out = row.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    k_from = (head * k_head_stride + position * k_row_stride)[:, None] + dim[None, :]
    tl.store(k_out + out, tl.load(k + k_from, mask=known, other=float("nan")), mask=mask)
    v_from = (head * v_head_stride + position * v_row_stride)[:, None] + dim[None, :]
    tl.store(v_out + out, tl.load(v + v_from, mask=known, other=float("nan")), mask=mask)
