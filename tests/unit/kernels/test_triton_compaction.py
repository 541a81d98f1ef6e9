"""Triton's gather: exact in the interpreter, and without spills on absent GPUs."""

from pathlib import Path

import pytest
import torch

from ...support import kernel_builds
from ...support.triton_aot import TARGETS, run_interpreted


@pytest.mark.interpreter
def test_the_interpreted_kernel_equals_indexing() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_compaction.py"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float32, 256)])
def test_the_shipped_gather_moves_16_bytes_at_a_time_without_spills(
    target: str, dtype: torch.dtype, head_dim: int
) -> None:
    code = kernel_builds.gather(target, dtype, head_dim)
    assert code.spills == 0
    assert code.has_wide_loads
