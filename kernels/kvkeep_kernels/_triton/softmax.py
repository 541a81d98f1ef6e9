# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""One tile of query rows over one run of keys, by online softmax in base 2.

The state of a row is (peak, mass, acc): its highest logit so far, the sum of ``2 ** (logit -
peak)``, and the same weights times the values, all fp32. It starts at (-inf, 0, 0), which is
also the state of a run without rows, and has no weight in a merge.

Source: FlashAttention-2; FlashDecoding for the partial states.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvkeep_kernels.layout import CodeKind

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)

NO_PEAK = tl.constexpr(-1e30)
"""The first peak where a row may see no key of a run: then no difference of peaks is NaN."""


class TileShape(NamedTuple):
    """How one program is shaped: a tile's most rows, keys per step, warps and stages."""

    block_m_max: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_shape(head_dim: int, dtype: torch.dtype, kind: CodeKind | None = None) -> TileShape:
    """The shipped configuration; none of them spills on any target that is compiled for.

    ``kind`` of the codes of a quantised context, None for plain rows.

    A step of 16-bit keys and values is 16 KiB and three are on their way at a time: two such
    programs keep a processor's share of an H200's memory busy (4.3 TB/s times 1 us over 132 is
    33 KiB), within the 99 KiB a program may have on the smallest GPUs. fp32 is for exactness,
    without matrix units, and is kept small enough for the registers. So are codes, which pass
    through them twice on their way to the matrix units.
    """
    if kind is not None:
        return _code_tile_shape(head_dim, dtype)
    if dtype == torch.float32:
        if head_dim > 128:
            return TileShape(16, 16, 4, 1)
        return TileShape(32, 16, 4 if head_dim <= 64 else 8, 1)
    block_d = max(64, triton.next_power_of_2(head_dim))
    # A width that is no power of two costs masks, which sm_80 has registers for at one step less.
    num_stages = 4 if block_d == head_dim else 3
    return TileShape(64, 4096 // block_d, 8 if head_dim > 128 else 4, num_stages)


def _code_tile_shape(head_dim: int, dtype: torch.dtype) -> TileShape:
    if dtype == torch.float32:
        # Wider than 128 it spills, in 4 bits; no model that is served has such heads.
        return TileShape(16, 16, 8, 1)
    return TileShape(32, 16, 8 if head_dim > 128 else 4, 3)


@triton.jit
def fold_run(
    q_rows,
    peak,
    mass,
    acc,
    k,
    v,
    k_stride,
    v_stride,
    rows,
    seen,
    scale_log2,
    window,
    IS_CAUSAL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold keys and values 0 to ``rows`` into the state of every row of the tile.

    Shapes: q_rows, acc [BLOCK_M, BLOCK_D]; peak, mass, seen [BLOCK_M]; k and v point at row 0,
    and row n lies n * stride elements on (int64). Where IS_CAUSAL, row m sees keys below
    ``seen[m]``, at least one of them within the first BLOCK_N. ``window`` as ``in_window`` takes
    it, or None; SOFT_CAP as ``scaled_logits``.
    """
    column = tl.arange(0, BLOCK_D)
    is_column = column < HEAD_DIM
    for first in range(0, rows, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        is_row = key < rows
        at = key.to(tl.int64)
        keys = tl.load(
            k + at[None, :] * k_stride + column[:, None],
            mask=is_row[None, :] & is_column[:, None],
            other=0.0,
        )
        # Not TF32 for fp32 inputs: three decimal digits are no fp32 result.
        products = tl.dot(q_rows, keys, input_precision="ieee")
        logits = scaled_logits(products, scale_log2, SOFT_CAP)
        is_seen = is_row[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (key[None, :] < seen[:, None])
        if window is not None:
            is_seen = is_seen & in_window(key, is_row, window)
        logits = tl.where(is_seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        values = tl.load(
            v + at[:, None] * v_stride + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        mass = mass * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        peak = new_peak
    return peak, mass, acc


@triton.jit
def scaled_logits(products, scale_log2, SOFT_CAP: tl.constexpr):
    """Logits in base 2, of ``SOFT_CAP * tanh(logit / SOFT_CAP)`` unless the cap is 0."""
    logits = products * scale_log2
    if SOFT_CAP != 0.0:
        cap: tl.constexpr = SOFT_CAP * _LOG2_E
        # tanh by way of an exponential that cannot overflow.
        power = tl.exp2(-tl.abs(logits) * (2.0 / SOFT_CAP))
        size = cap * (1.0 - power) / (1.0 + power)
        logits = tl.where(logits < 0.0, -size, size)
    return logits


@triton.jit
def in_window(key, is_row, window):
    """Whether each row of the tile sees each key of a step: [BLOCK_M, BLOCK_N].

    ``window``: a pointer to the positions of the run's rows, whether it has them (a tail's follow
    from the keys), a number to be added to them, and what row m sees first [BLOCK_M].
    """
    positions, is_placed, shift, first_seen = window
    position = tl.load(positions + key, mask=is_row & is_placed, other=0)
    position = tl.where(is_placed, position, key) + shift
    return position[None, :] >= first_seen[:, None]
