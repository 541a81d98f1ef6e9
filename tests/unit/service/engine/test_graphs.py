"""A decode step can be captured: proved without a GPU, by doing again what was recorded."""

from pathlib import Path

import pytest

from ....support.triton_aot import run_interpreted


@pytest.mark.interpreter
def test_steps_that_are_replayed_equal_the_oracle() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_steps.py"))
