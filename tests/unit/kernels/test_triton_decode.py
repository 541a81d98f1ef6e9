"""Triton's decode: right in the interpreter, without spills on absent GPUs, and never waiting."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from kvkeep_kernels import attention
from kvkeep_kernels._triton import decode, work_list
from kvkeep_kernels.layout import CodeKind, DecodeBatch, DecodeGroup, LogitBounds

from ...support import kernel_builds
from ...support.ragged_values import dense, placed, ragged
from ...support.triton_aot import SHARED_BYTES_MAX, TARGETS, run_interpreted


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_decode.py"))


@pytest.mark.interpreter
def test_a_step_reads_each_kept_row_once_however_many_share_it() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_bytes.py"))


# A tile that is full, and one of the fewest rows; fp32 where it is nearest to spilling; contexts
# of int4 everywhere, as they take the most registers, and of fp8, which no target has to know.
CONFIGURATIONS = [
    *(
        (target, torch.bfloat16, width, None, None)
        for target in TARGETS
        for width in (64, 128, 256)
    ),
    *((target, torch.bfloat16, 128, 16, None) for target in ("sm_80", "gfx942")),
    ("sm_80", torch.bfloat16, 96, None, None),
    *(("sm_80", torch.float32, width, None, None) for width in (128, 256)),
    *((target, torch.bfloat16, 128, None, kind) for target in TARGETS for kind in ("int4", "fp8")),
    ("gfx942", torch.bfloat16, 64, None, "int4"),
    *(("sm_80", torch.bfloat16, width, None, "int4") for width in (96, 256)),
    ("sm_90", torch.bfloat16, 128, None, "int8"),
    ("sm_80", torch.bfloat16, 256, None, "fp8"),
    ("sm_80", torch.float32, 128, None, "int4"),
]


@pytest.mark.parametrize(("target", "dtype", "head_dim", "rows", "kind"), CONFIGURATIONS, ids=str)
def test_a_shipped_tile_neither_spills_nor_misses_the_matrix_units(
    target: str, dtype: torch.dtype, head_dim: int, rows: int | None, kind: CodeKind | None
) -> None:
    code = kernel_builds.attend_items(target, dtype, head_dim, rows=rows, kind=kind)
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    # An fp32 product of full precision has no matrix instruction on NVIDIA.
    assert code.matrix_instructions > 0 or dtype == torch.float32
    # The addresses come from a table, so the compiler has only our word for their alignment.
    assert code.has_wide_loads


@pytest.mark.parametrize("target", TARGETS)
def test_planning_merging_and_appending_compile_without_spills(target: str) -> None:
    plan = kernel_builds.plan_items(target)
    merge = kernel_builds.merge_items(target, head_dim=256)
    append = kernel_builds.append_rows(target, head_dim=96)
    assert (plan.spills, merge.spills, append.spills) == (0, 0, 0)


class Recorder:
    """Takes the place of a jit function and keeps the grids it is launched on."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *_, **__: None


def refuse(*_: object, **__: object) -> NoReturn:
    pytest.fail("the host waits for the device")


def test_a_step_is_three_launches_of_fixed_shape_that_never_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, attend, merge = Recorder(), Recorder(), Recorder()
    monkeypatch.setattr(work_list, "plan_items", plan)
    monkeypatch.setattr(decode, "attend_items", attend)
    monkeypatch.setattr(decode, "merge_items", merge)
    monkeypatch.setattr(attention, "uses_triton", lambda _: True)
    # A context's own check reads its lengths, when the context is made and not at a step.
    pairs = [
        [placed(ragged(lengths, 64, seed), 900) for seed, lengths in enumerate((own, [2, 2]))]
        for own in ([1, 3], [700, 0])
    ]
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for context, other in pairs:
        groups = (
            DecodeGroup(context, (dense(2, 1, 64), dense(2, 5, 64))),
            DecodeGroup(other, (dense(2, 9, 64),)),
        )
        q, bounds = torch.randn(3, 6, 64), LogitBounds(window=7)
        attention.ragged_decode_batch(q, DecodeBatch(groups), scale=1.0, bounds=bounds)
    assert [len(launched.grids) for launched in (plan, attend, merge)] == [2, 2, 2]
    for launched in (plan, attend, merge):
        assert launched.grids[0] == launched.grids[1]
    # Two contexts of two heads, and three tails of two heads.
    assert plan.grids[0] == (10,)
