# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""The newest row of every tail, written to where a decode step's tables say that tails are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep_kernels._triton.work_list import SEQUENCE_COLUMNS


def append(k: Tensor, v: Tensor, sequences: Tensor) -> None:
    """Write one row of K and V per sequence and head as the last of its tail.

    Shapes: k, v [num_sequences, num_kv_heads, head_dim], each row contiguous; sequences as in
        ``DecodeTables``, tail tokens counting the new row. Modifies: the tails. Launches
        asynchronously on the current stream; no host sync.
    """
    assert k.stride(2) == v.stride(2) == 1, "a row is read as it lies"
    num_sequences, num_kv_heads, head_dim = k.shape
    with torch.cuda.device_of(k):
        append_rows[(num_sequences, num_kv_heads)](
            *(k, v, sequences, *k.stride()[:2], *v.stride()[:2]),
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=1,
        )


@triton.jit(
    do_not_specialize=["k_sequence_stride", "k_head_stride", "v_sequence_stride", "v_head_stride"]
)
def append_rows(
    k,
    v,
    sequences,
    k_sequence_stride,
    k_head_stride,
    v_sequence_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program covers the new row of one head of one sequence. Shapes: as ``append``."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    entry = sequences + sequence * SEQUENCE_COLUMNS
    last = tl.load(entry + 6) - 1
    column = tl.arange(0, BLOCK_D)
    is_column = column < HEAD_DIM
    k_row = k + sequence * k_sequence_stride + head * k_head_stride + column
    v_row = v + sequence * v_sequence_stride + head * v_head_stride + column
    own_k = tl.load(entry).to(k.dtype) + head * tl.load(entry + 2) + last * tl.load(entry + 4)
    own_v = tl.load(entry + 1).to(v.dtype) + head * tl.load(entry + 3) + last * tl.load(entry + 5)
    tl.store(own_k + column, tl.load(k_row, mask=is_column), mask=is_column)
    tl.store(own_v + column, tl.load(v_row, mask=is_column), mask=is_column)
