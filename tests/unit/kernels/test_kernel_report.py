"""docs/kernels.md is what the generator writes, as far as can be told without compiling."""

import re
from pathlib import Path

from kvkeep_kernels import _triton

from ...support import kernel_report
from ...support.triton_aot import TARGETS

TEXT = kernel_report.DOCUMENT.read_text()
_LAUNCH = re.compile(r"\b(\w+)\[(?:grid|\(.*\))\]\($", re.MULTILINE)
_ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \| (.*) \|$", re.MULTILINE)


def launched_kernels() -> set[str]:
    """Every name that a module of the Triton kernels launches on a grid."""
    sources = [path.read_text() for path in Path(_triton.__file__).parent.glob("*.py")]
    return {name for text in sources for name in _LAUNCH.findall(text)}


def test_every_kernel_that_is_launched_and_every_form_that_ships_has_a_line() -> None:
    lines = [(name, form.strip()) for name, form, _ in _ROW.findall(TEXT)]
    assert lines == list(kernel_report.CONFIGURATIONS)
    assert {name for name, _ in lines} == launched_kernels()


def test_no_line_shows_a_spill_or_lacks_a_target() -> None:
    assert f"| kernel | form | {' | '.join(TARGETS)} |" in TEXT
    for _, _, cells in _ROW.findall(TEXT):
        numbers = [cell.strip().split(" · ") for cell in cells.split("|")]
        assert len(numbers) == len(TARGETS)
        assert [cell[1] for cell in numbers] == ["0"] * len(TARGETS)


def test_the_predictions_are_those_of_the_shapes_that_ship() -> None:
    assert "\n".join(kernel_report.predictions()) in TEXT
    for part in (kernel_report.HEADER, kernel_report.FORMULAS):
        assert part in TEXT
