"""Thirty kills at random moments, as ``make soak`` makes three hundred."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault

REPOSITORY = Path(__file__).parents[2]


def _soak(*arguments: str) -> None:
    """Run the soak in a process of its own; its output names the seed that repeats it."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fault.soak", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stdout.write(ended.stdout)
    assert ended.returncode == 0, ended.stdout


def test_field_25_processes_killed_anywhere_lose_nothing_and_leave_nothing() -> None:
    _soak("--kills", "25", "--server-kills", "0")


def test_field_05_a_server_killed_again_and_again_gives_the_same_answers() -> None:
    _soak("--kills", "0", "--server-kills", "5")
