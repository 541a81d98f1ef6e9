"""How much memory a step takes at its highest, as Linux with glibc counts it for the process."""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Outcome = TypeVar("Outcome")

_STATUS = Path("/proc/self/status")
# Writing 5 there makes the highest resident set start again from the present one.
_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes resident before a step, and at its highest."""

    before_bytes: int
    highest_bytes: int

    @property
    def added_bytes(self) -> int:
        """What the step needed beside what was there."""
        return self.highest_bytes - self.before_bytes


def peak_of(step: Callable[[], Outcome]) -> tuple[Outcome, Peak]:
    """Run a step; what it returned, and how high the process rose meanwhile."""
    gc.collect()
    # Else what steps before have freed is still resident, and this one's own seems to need nothing.
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5")
    before = _bytes("VmRSS")
    outcome = step()
    return outcome, Peak(before, _bytes("VmHWM"))


def _bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} does not tell {name}")
