"""Triton's prefill: right in the interpreter, and without spills on absent GPUs."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch

from kvkeep_kernels import attention
from kvkeep_kernels._triton import prefill
from kvkeep_kernels.layout import CodeKind, LogitBounds

from ...support import kernel_builds
from ...support.ragged_values import dense, placed, ragged
from ...support.triton_aot import SHARED_BYTES_MAX, TARGETS, run_interpreted


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_prefill.py"))


CONFIGURATIONS = [
    *((target, torch.bfloat16, width, None) for target in TARGETS for width in (128, 256)),
    ("sm_80", torch.bfloat16, 96, None),
    *(("sm_80", torch.float32, width, None) for width in (64, 256)),
    *((target, torch.bfloat16, 128, "int4") for target in TARGETS),
    *((target, torch.bfloat16, 128, "fp8") for target in ("sm_90", "gfx942")),
    ("sm_80", torch.float32, 128, "int4"),
    ("gfx942", torch.bfloat16, 64, "int8"),
]


@pytest.mark.parametrize(("target", "dtype", "head_dim", "kind"), CONFIGURATIONS, ids=str)
def test_a_shipped_tile_neither_spills_nor_misses_the_matrix_units(
    target: str, dtype: torch.dtype, head_dim: int, kind: CodeKind | None
) -> None:
    code = kernel_builds.attend_shares(target, dtype, head_dim, kind=kind)
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    # An fp32 product of full precision has no matrix instruction on NVIDIA.
    assert code.matrix_instructions > 0 or dtype == torch.float32


def refuse(*_: object, **__: object) -> NoReturn:
    pytest.fail("the host waits for the device")


def test_a_question_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_, **__: None

    for name in ("attend_shares", "merge_shares"):
        monkeypatch.setattr(prefill, name, Idle())
    monkeypatch.setattr(attention, "uses_triton", lambda _: True)
    context, tail = placed(ragged([700, 0], 64, seed=1), 900), dense(2, 9, 64)
    q, bounds = torch.randn(6, 5, 64), LogitBounds(window=7)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    out = attention.ragged_prefill(q, context, tail, scale=1.0, bounds=bounds)
    assert out.shape == q.shape


@pytest.mark.parametrize("target", TARGETS)
def test_merging_compiles_without_spills(target: str) -> None:
    merge = kernel_builds.merge_shares(target, head_dim=256)
    assert merge.spills == 0
