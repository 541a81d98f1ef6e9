"""Triton's prefill: right in the interpreter, and without spills on absent GPUs."""

from pathlib import Path

import pytest
import torch
import triton

from kvkeep_kernels._triton import prefill
from kvkeep_kernels._triton.softmax import tile_shape

from ...support.triton_aot import (
    DTYPE_NAMES,
    SHARED_BYTES_MAX,
    TARGETS,
    compile_for,
    run_interpreted,
)

PARTS = {"part_out": "*fp32", "part_peak": "*fp32", "part_mass": "*fp32"}
STRIDES = (
    *("k_stride", "v_stride", "tail_k_head_stride", "tail_v_head_stride"),
    *("tail_k_stride", "tail_v_stride"),
)


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_prefill.py"))


HALVES = ("k_scale", "k_zero", "v_scale", "v_zero", "k_mean")
CONFIGURATIONS = [
    *((target, torch.bfloat16, width, 0) for target in TARGETS for width in (128, 256)),
    ("sm_80", torch.bfloat16, 96, 0),
    *((target, torch.float32, width, 0) for target in ("sm_80", "sm_90") for width in (64, 256)),
    *((target, torch.bfloat16, 128, 4) for target in TARGETS),
    ("sm_80", torch.float32, 128, 4),
    ("gfx942", torch.bfloat16, 64, 8),
]


@pytest.mark.parametrize(("target", "dtype", "head_dim", "bits"), CONFIGURATIONS, ids=str)
def test_a_shipped_tile_neither_spills_nor_misses_the_matrix_units(
    target: str, dtype: torch.dtype, head_dim: int, bits: int
) -> None:
    shape = tile_shape(head_dim, dtype, bits)
    pointer = f"*{DTYPE_NAMES[dtype]}"
    code = compile_for(
        target,
        prefill.attend_shares,
        {
            **dict.fromkeys(("q", "tail_k", "tail_v"), pointer),
            **dict.fromkeys(("context_k", "context_v"), "*u8" if bits else pointer),
            **dict.fromkeys(HALVES[: {0: 0, 8: 4, 4: 5}[bits]], "*fp16"),
            "start": "*i32",
            "length": "*i32",
            **PARTS,
            "tokens": "i32",
            "tail_tokens": "i32",
            "scale_log2": "fp32",
            **dict.fromkeys(STRIDES, "i32"),
        },
        {
            **dict.fromkeys(HALVES[{0: 0, 8: 4, 4: 5}[bits] :]),
            "BITS": bits,
            "GROUP": 4,
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_M": shape.block_m_max,
            "BLOCK_N": shape.block_n,
        },
        divisible=STRIDES,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    # An fp32 product of full precision has no matrix instruction on NVIDIA.
    assert code.matrix_instructions > 0 or dtype == torch.float32


@pytest.mark.parametrize("target", TARGETS)
def test_merging_compiles_without_spills(target: str) -> None:
    merge = compile_for(
        target,
        prefill.merge_shares,
        {**PARTS, "out": "*bf16", "rows": "i32", "shares": "i32"},
        {"HEAD_DIM": 256, "BLOCK_D": 256, "BLOCK_R": prefill.MERGED_ROWS},
    )
    assert merge.spills == 0
