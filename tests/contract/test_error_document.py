"""docs/errors.md lists every error code there is, with its status, and no other."""

import re
from pathlib import Path

import pytest

from kvkeep_service.api.errors import CATALOGUE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = re.split(r"^## ", TEXT.partition(f"## {title}\n")[2], maxsplit=1, flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def codes(title: str) -> list[str]:
    return [cells[0].strip("`") for cells in rows(title)]


def found_in(folder: str, pattern: str) -> set[str]:
    sources = (ROOT / folder).rglob("*.py")
    return {code for path in sources for code in re.findall(pattern, path.read_text())}


def test_every_code_of_the_api_is_documented_with_its_status_and_meaning() -> None:
    documented = {cells[0].strip("`"): int(cells[1]) for cells in rows("Over HTTP")}
    assert documented == {code: entry.status for code, entry in CATALOGUE.items()}
    assert len(documented) == len(rows("Over HTTP"))
    assert all(len(cells) == 4 and all(cells) for cells in rows("Over HTTP"))


def test_every_code_that_a_build_fails_with_is_documented() -> None:
    raised = found_in("service", r'(?:BuildFailed\(|_fail\(job, )"(\w+)"')
    assert {"build_failed", "build_too_large"} <= raised
    assert set(codes("Of a build")) == raised | {"cache_corrupt"}


def test_every_code_of_the_client_is_documented() -> None:
    raised = found_in("clients/python", r'(?:code=|"code": )"(\w+)"')
    assert {"unreachable", "usage"} <= raised
    assert set(codes("Of the client")) == raised


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w.]+\.md)", TEXT))))
def test_what_it_refers_to_is_there(link: str) -> None:
    assert (ROOT / "docs" / link).is_file()
