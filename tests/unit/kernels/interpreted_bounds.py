"""The Triton kernels with soft caps and windows; run by ``test_bounds`` in the interpreter."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from triton.runtime.errors import InterpreterError

from kvkeep_kernels._triton import codes, decode, prefill, softmax
from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.layout import CodeKind, LogitBounds

from ...support.triton_interpreter import mutated, poisoned_memory
from .bounded_cases import BoundedCase, cases


def test_triton_serves_these_tests() -> None:
    assert uses_triton(torch.device("cpu"))


@settings(max_examples=8)
@given(case=cases())
def test_a_bounded_step_equals_the_oracle(case: BoundedCase) -> None:
    with poisoned_memory():
        case.check()


def test_logits_far_beyond_a_cap_are_the_cap() -> None:
    BoundedCase(((70,),), (1,), LogitBounds(soft_cap=0.01), group_size=1).check()


@pytest.mark.parametrize("kind", [None, "int4", "fp8"])
def test_a_tail_longer_than_its_window_and_a_context_out_of_sight(kind: CodeKind | None) -> None:
    # Whole items of the tail, and all of the context, are seen by nobody.
    BoundedCase(((40, 0),), (3, 200), LogitBounds(20.0, 9), group_size=3, kind=kind).check()


MUTANTS = {
    "cap-in-base-2": (softmax, "SOFT_CAP * _LOG2_E", "SOFT_CAP * 1.0"),
    "cap-too-steep": (softmax, "(2.0 / SOFT_CAP)", "(4.0 / SOFT_CAP)"),
    "window-off-by-one": (softmax, "position[None, :] >= first", "position[None, :] > first"),
    "window-over-keys": (softmax, "tl.where(is_placed, position, key)", "key"),
    "rows-of-item-0": (decode, "mask=is_context, other=0) + first_row\n", "mask=is_context)\n"),
    "end-ignored": (decode, "tl.where(is_context, -end, first_row)", "first_row"),
    "tail-from-its-first": (decode, "-end, first_row)", "-end, 0)"),
    "no-first-peak": (decode, "peak = tl.full((BLOCK_M,), NO_PEAK", "_ = tl.full((BLOCK_M,), 0.0"),
    "mean-behind-the-cap": (codes, "if mean is not None:", "if False:"),
    "codes-see-all": (codes, "if window is not None:", "if False:"),
    "question-off-by-one": (prefill, "-end, seen - WINDOW", "-end, seen - 1 - WINDOW"),
    "own-tokens-see-all": (prefill, "False, 0, seen - WINDOW", "False, 0, seen - 99"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_bound_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, found, planted = MUTANTS[mutant]
    broken = mutated(module, found, planted, tmp_path)
    named = {softmax: "fold_run", codes: "fold_codes", prefill: "attend_shares"}
    for place in (decode, prefill):
        name = named.get(module, "attend_items")
        if hasattr(place, name):
            monkeypatch.setattr(place, name, getattr(broken, name))
    kind = "int4" if module is codes else None
    # A context and a tail of several items each, rows at every position of a short text.
    shape = {"lengths": ((300, 40),), "tails": (200, 2, 6), "text_tokens": 12, "group_size": 2}
    case = BoundedCase(bounds=LogitBounds(2.0, 5), kind=kind, **shape)
    # The interpreter does not let a NaN arise.
    with pytest.raises((AssertionError, InterpreterError)):
        case.check()
