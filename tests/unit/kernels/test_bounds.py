"""Soft caps and sliding windows: every path equals the oracle, and nobody else pays for them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from kvkeep_kernels.attention import ragged_decode, ragged_prefill
from kvkeep_kernels.layout import CodeKind, LogitBounds, Placement, RaggedKV, ShapeError

from ...support import kernel_builds
from ...support.ragged_values import dense, ragged
from ...support.triton_aot import SHARED_BYTES_MAX, run_interpreted
from .bounded_cases import BoundedCase, cases


@pytest.mark.interpreter
def test_the_interpreted_kernels_equal_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_bounds.py"))


@settings(max_examples=30)
@given(case=cases())
def test_a_bounded_step_equals_the_oracle(case: BoundedCase) -> None:
    case.check()


def test_a_cap_that_no_logit_comes_near_and_a_window_over_all_change_nothing() -> None:
    case = BoundedCase(((40, 3),), (2, 5), LogitBounds(1e4, 10_000), group_size=2)
    unbounded = BoundedCase(((40, 3),), (2, 5), LogitBounds(), group_size=2)
    for wide, plain in zip(case.outputs(), unbounded.outputs(), strict=True):
        torch.testing.assert_close(wide, plain, rtol=1e-4, atol=1e-5)


def test_a_window_of_one_sees_the_own_row_alone() -> None:
    case = BoundedCase(((40, 3),), (1, 5), LogitBounds(window=1), group_size=2)
    out = case.outputs()[0]
    for member, tail in enumerate(case.batch.groups[0].tails):
        own = tail.v[:, -1].repeat_interleave(2, 0)
        torch.testing.assert_close(out[member], own)


def test_bounds_that_mean_nothing_and_windows_over_unplaced_rows_are_refused() -> None:
    for wrong in ({"soft_cap": 0.0}, {"soft_cap": float("nan")}, {"window": 0}):
        with pytest.raises(ShapeError):
            LogitBounds(**wrong)
    context, tail = ragged([4, 4], 64, seed=1), dense(2, 1, 64)
    window = LogitBounds(window=3)
    with pytest.raises(ShapeError, match=r"^context.placement: "):
        ragged_decode(torch.randn(1, 2, 64), context, [tail], scale=1.0, bounds=window)
    with pytest.raises(ShapeError, match=r"^context.placement: "):
        ragged_prefill(torch.randn(2, 1, 64), context, tail, scale=1.0, bounds=window)
    for positions in (torch.zeros(7, dtype=torch.int32), torch.zeros(8)):
        with pytest.raises(ShapeError, match=r"^placement.positions: "):
            RaggedKV(context.k, context.v, context.start, context.length, Placement(positions, 9))


GEMMA_2 = LogitBounds(soft_cap=50.0, window=4096)
GEMMA_3 = LogitBounds(window=512)
CONFIGURATIONS = [
    *((target, GEMMA_2, 256, None) for target in ("sm_80", "gfx942")),
    ("sm_100", GEMMA_3, 256, None),
    ("sm_90", GEMMA_2, 128, "int4"),
]


@pytest.mark.parametrize("kernel", ["attend_items", "attend_shares"])
@pytest.mark.parametrize(("target", "bounds", "head_dim", "kind"), CONFIGURATIONS, ids=str)
def test_a_bounded_tile_does_not_spill(
    kernel: str, target: str, bounds: LogitBounds, head_dim: int, kind: CodeKind | None
) -> None:
    build = getattr(kernel_builds, kernel)
    code = build(target, torch.bfloat16, head_dim, kind=kind, bounds=bounds)
    assert code.spills == 0
    assert code.shared_bytes <= SHARED_BYTES_MAX
    assert code.matrix_instructions > 0
