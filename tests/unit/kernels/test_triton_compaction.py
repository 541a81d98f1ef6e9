"""Triton's gather: exact in the interpreter, and without spills on absent GPUs."""

from pathlib import Path

import pytest
import torch
import triton

from kvkeep_kernels._triton import compaction

from ...support.triton_aot import DTYPE_NAMES, TARGETS, compile_for, run_interpreted

STRIDES = ("k_head_stride", "k_row_stride", "v_head_stride", "v_row_stride")


@pytest.mark.interpreter
def test_the_interpreted_kernel_equals_indexing() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_compaction.py"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float32, 256)])
def test_the_shipped_gather_moves_16_bytes_at_a_time_without_spills(
    target: str, dtype: torch.dtype, head_dim: int
) -> None:
    rows = f"*{DTYPE_NAMES[dtype]}"
    pointers = dict.fromkeys(("k", "v", "k_out", "v_out"), rows)
    sizes = dict.fromkeys((*STRIDES, "tokens", "rows", "num_kv_heads"), "i32")
    code = compile_for(
        target,
        compaction.gather_kernel,
        {**pointers, "positions": "*i64", "end": "*i32", **sizes},
        {
            "HEADS": 8,
            "HEAD_DIM": head_dim,
            "BLOCK_DIM": triton.next_power_of_2(head_dim),
            "BLOCK_ROWS": compaction.rows_per_program(head_dim),
        },
        divisible=STRIDES,
        num_warps=compaction.NUM_WARPS,
    )
    assert code.spills == 0
    assert code.has_wide_loads
