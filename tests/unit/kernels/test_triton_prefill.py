"""Triton's prefill: right in the interpreter, and without spills on absent GPUs."""

from pathlib import Path

import pytest
import torch

from ...support import kernel_builds
from ...support.triton_aot import SHARED_BYTES_MAX, TARGETS, run_interpreted


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_prefill.py"))


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
    code = kernel_builds.attend_shares(target, dtype, head_dim, bits=bits)
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    # An fp32 product of full precision has no matrix instruction on NVIDIA.
    assert code.matrix_instructions > 0 or dtype == torch.float32


@pytest.mark.parametrize("target", TARGETS)
def test_merging_compiles_without_spills(target: str) -> None:
    merge = kernel_builds.merge_shares(target, head_dim=256)
    assert merge.spills == 0
