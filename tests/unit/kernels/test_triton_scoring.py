"""Triton's scoring: right in the interpreter, and without spills on absent GPUs."""

from pathlib import Path

import pytest
import torch
import triton

from kvkeep_kernels._triton import scoring

from ...support.triton_aot import (
    DTYPE_NAMES,
    SHARED_BYTES_MAX,
    TARGETS,
    MachineCode,
    compile_for,
    run_interpreted,
)

COLUMN_STRIDES = ("q_head_stride", "q_row_stride", "k_head_stride", "k_row_stride")
ROW_STRIDES = tuple(
    f"{name}_{axis}_stride"
    for name in ("q", "prefix", "chunk", "repeat")
    for axis in ("head", "row")
)


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracles() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_scoring.py"))


def column_code(target: str, dtype: torch.dtype, head_dim: int, op: str) -> MachineCode:
    tile, rows = scoring.tile_shape(head_dim, dtype), f"*{DTYPE_NAMES[dtype]}"
    pointers = {"q": rows, "k": rows, "lse": "*fp32", "out": "*fp32"}
    bounds = ("first_query", "last_query")
    sizes = dict.fromkeys((*COLUMN_STRIDES, "rows", "columns", "group_size"), "i32")
    width = {"HEAD_DIM": head_dim, "BLOCK_DIM": triton.next_power_of_2(head_dim)}
    block = {"BLOCK_COLUMNS": tile.owned, "BLOCK_ROWS": tile.streamed}
    # KVzip takes a maximum without bounds, KVzip+ with factors, KVpop a sum within bounds.
    given = {
        "max": {},
        "plus": {"log_factor": "*fp32"},
        "logsum": dict.fromkeys(bounds, "*i32"),
    }[op]
    absent = {name: None for name in (*bounds, "log_factor") if name not in given}
    return compile_for(
        target,
        scoring.column_reduce_kernel,
        {**pointers, **given, **sizes, "scale": "fp32"},
        {"IS_LOGSUM": op == "logsum", **absent, **width, **block},
        divisible=COLUMN_STRIDES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def row_code(target: str, dtype: torch.dtype, head_dim: int) -> MachineCode:
    tile, rows = scoring.tile_shape(head_dim, dtype), f"*{DTYPE_NAMES[dtype]}"
    pointers = {**dict.fromkeys(("q", "k_prefix", "k_chunk", "k_repeat"), rows), "lse": "*fp32"}
    tokens = ("prefix_tokens", "chunk_tokens", "repeat_tokens")
    sizes = dict.fromkeys((*ROW_STRIDES, "rows", "group_size", *tokens), "i32")
    width = {"HEAD_DIM": head_dim, "BLOCK_DIM": triton.next_power_of_2(head_dim)}
    return compile_for(
        target,
        scoring.row_lse_kernel,
        {**pointers, **sizes, "scale": "fp32"},
        {**width, "BLOCK_ROWS": tile.owned, "BLOCK_KEYS": tile.streamed},
        divisible=ROW_STRIDES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


# The widest heads are nearest to spilling, and fp32 most of all on the newest target.
CONFIGURATIONS = [
    *((target, torch.bfloat16, width) for target in TARGETS for width in (128, 256)),
    ("sm_100", torch.float32, 256),
]


@pytest.mark.parametrize(("target", "dtype", "head_dim"), CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("kernel", ["max", "plus", "logsum", "row_lse"])
def test_a_shipped_tile_neither_spills_nor_misses_the_matrix_units(
    kernel: str, target: str, dtype: torch.dtype, head_dim: int
) -> None:
    if kernel == "row_lse":
        code = row_code(target, dtype, head_dim)
    else:
        code = column_code(target, dtype, head_dim, kernel)
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    # An fp32 product of full precision has no matrix instruction on NVIDIA.
    assert code.matrix_instructions > 0 or dtype == torch.float32
    assert code.has_wide_loads
