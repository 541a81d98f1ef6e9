"""Triton's decode: right in the interpreter, without spills on absent GPUs, and never waiting."""

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import triton

from kvkeep_kernels._triton import decode, work_list
from kvkeep_kernels._triton.softmax import tile_shape
from kvkeep_kernels.layout import DecodeBatch, DecodeGroup

from ...support.ragged_values import dense, ragged
from ...support.triton_aot import (
    DTYPE_NAMES,
    SHARED_BYTES_MAX,
    TARGETS,
    compile_for,
    run_interpreted,
)

PARTS = {"part_out": "*fp32", "part_peak": "*fp32", "part_mass": "*fp32"}


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_decode.py"))


def sizes(head_dim: int, block_m: int) -> dict[str, object]:
    block_d = triton.next_power_of_2(head_dim)
    tile = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m}
    return {"HEADS": 8, "GROUP": 4, **tile}


# A tile that is full, and one of the fewest rows; fp32 where it is nearest to spilling; contexts
# of 4 bits everywhere, as they take more registers than those of 8.
CONFIGURATIONS = [
    *((target, torch.bfloat16, width, None, 0) for target in TARGETS for width in (64, 128, 256)),
    *((target, torch.bfloat16, 128, 16, 0) for target in TARGETS),
    ("sm_80", torch.bfloat16, 96, None, 0),
    *(
        (target, torch.float32, width, None, 0)
        for target in ("sm_80", "sm_90")
        for width in (128, 256)
    ),
    *((target, torch.bfloat16, 128, None, 4) for target in TARGETS),
    *((target, torch.bfloat16, 64, None, 4) for target in ("sm_80", "gfx942")),
    *(("sm_80", torch.bfloat16, width, None, 4) for width in (96, 256)),
    *((target, torch.bfloat16, 128, None, 8) for target in ("sm_90", "gfx942")),
    ("sm_80", torch.float32, 128, None, 4),
]


@pytest.mark.parametrize(("target", "dtype", "head_dim", "rows", "bits"), CONFIGURATIONS, ids=str)
def test_a_shipped_tile_neither_spills_nor_misses_the_matrix_units(
    target: str, dtype: torch.dtype, head_dim: int, rows: int | None, bits: int
) -> None:
    shape = tile_shape(head_dim, dtype, bits)
    code = compile_for(
        target,
        decode.attend_items,
        {
            "q": f"*{DTYPE_NAMES[dtype]}",
            **dict.fromkeys(("tiles", "scales", "runs"), "*i64"),
            "items": "*i32",
            **PARTS,
            "num_tiles": "i32",
            "num_slots": "i32",
            "scale_log2": "fp32",
        },
        {**sizes(head_dim, rows or shape.block_m_max), "BLOCK_N": shape.block_n, "BITS": bits},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    # An fp32 product of full precision has no matrix instruction on NVIDIA.
    assert code.matrix_instructions > 0 or dtype == torch.float32
    # The addresses come from a table, so the compiler has only our word for their alignment.
    assert code.has_wide_loads


@pytest.mark.parametrize("target", TARGETS)
def test_planning_and_merging_compile_without_spills(target: str) -> None:
    numbers = {"num_tiles": "i32", "num_runs": "i32", "num_slots": "i32"}
    tables = {"tiles": "*i64", "sequences": "*i64"}
    plan = compile_for(
        target,
        work_list.plan_items,
        {**tables, "runs": "*i64", "indptr": "*i32", "items": "*i32", **numbers},
        {
            "HEADS": 8,
            "CONTEXT_BYTES": 1,
            "TAIL_BYTES": 2,
            "BLOCK_N": 64,
            "RUNS": 256,
            "SLOTS": 512,
        },
    )
    merge = compile_for(
        target,
        decode.merge_items,
        {**tables, "indptr": "*i32", **PARTS, "out": "*bf16", "num_tiles": "i32"},
        {**sizes(256, 64), "BLOCK_I": decode.MERGED_ITEMS},
    )
    assert (plan.spills, merge.spills) == (0, 0)


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
    batches = []
    for lengths in ([1, 3], [700, 0]):
        context, other = ragged(lengths, 64, seed=1), ragged([2, 2], 64, seed=2)
        groups = (
            DecodeGroup(context, (dense(2, 1, 64), dense(2, 5, 64))),
            DecodeGroup(other, (dense(2, 9, 64),)),
        )
        batches.append(DecodeBatch(groups))
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for batch in batches:
        q = torch.randn(3, 6, 64)
        decode.launch(q, work_list.tabulate(batch, group_size=3), scale=1.0)
    assert [len(launched.grids) for launched in (plan, attend, merge)] == [2, 2, 2]
    for launched in (plan, attend, merge):
        assert launched.grids[0] == launched.grids[1]
    # Two contexts of two heads, and three tails of two heads.
    assert plan.grids[0] == (10,)
