"""docs/reliability.md names a test for every fault, and each of these tests exists."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROMISED = [*range(1, 44), 53, 54, 55, 57, 58, 59]

_ROW = re.compile(r"^\| (\d\d) \|(.+)\|(.+)\|(.+)\|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def _rows() -> list[tuple[int, str]]:
    """The number of each row, and the cell with its tests."""
    text = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    return [(int(number), tests) for number, _, _, tests in _ROW.findall(text)]


@cache
def _tests_in(path: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def test_every_fault_that_concerns_us_stands_there_once() -> None:
    assert Counter(number for number, _ in _rows()) == Counter(PROMISED)


def test_every_fault_has_tests_that_exist_and_carry_its_number() -> None:
    missing = []
    for number, cell in _rows():
        tests = _TEST.findall(cell)
        if not tests:
            missing.append(f"{number:02d} names no test")
        for path, name in tests:
            if not name.startswith(f"test_field_{number:02d}_"):
                missing.append(f"{number:02d}: {name} carries another number")
            elif not (REPOSITORY / path).exists() or name not in _tests_in(path):
                missing.append(f"{number:02d}: there is no {path}::{name}")
    assert missing == []
