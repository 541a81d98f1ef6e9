"""Triton's scoring: right in the interpreter, and without spills on absent GPUs."""

from pathlib import Path

import pytest
import torch

from ...support import kernel_builds
from ...support.triton_aot import SHARED_BYTES_MAX, TARGETS, run_interpreted


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracles() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_scoring.py"))


# The widest heads are nearest to spilling, and fp32 most of all on the newest target.
TILES = [
    *((target, torch.bfloat16, width) for target in TARGETS for width in (128, 256)),
    ("sm_100", torch.float32, 256),
]
# Factors are one load more than a maximum.
CONFIGURATIONS = [
    *((kernel, *tile) for kernel in ("max", "logsum", "row_lse") for tile in TILES),
    *(("plus", target, torch.bfloat16, 256) for target in TARGETS),
]


@pytest.mark.parametrize(("kernel", "target", "dtype", "head_dim"), CONFIGURATIONS, ids=str)
def test_a_shipped_tile_neither_spills_nor_misses_the_matrix_units(
    kernel: str, target: str, dtype: torch.dtype, head_dim: int
) -> None:
    if kernel == "row_lse":
        code = kernel_builds.row_lse(target, dtype, head_dim)
    else:
        code = kernel_builds.column_reduce(target, dtype, head_dim, kernel)
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    # An fp32 product of full precision has no matrix instruction on NVIDIA.
    assert code.matrix_instructions > 0 or dtype == torch.float32
    assert code.has_wide_loads
