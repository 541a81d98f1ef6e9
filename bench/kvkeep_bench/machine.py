"""What the figures were measured on."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine line. ``load_average`` is over the minute before the run: others at work."""

    cpu: str
    cores: int
    threads: int
    instructions: str
    python: str
    torch: str
    transformers: str
    commit: str
    load_average: float

    @classmethod
    def here(cls) -> "Machine":
        """Look at this machine, now."""
        return cls(
            cpu=_cpu_name(),
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            instructions=torch.backends.cpu.get_cpu_capability(),
            python=platform.python_version(),
            torch=version("torch"),
            transformers=version("transformers"),
            commit=_commit(),
            load_average=round(os.getloadavg()[0], 2),
        )

    def line(self, dtype: str) -> str:
        """The machine in words, with the dtype that a model ran in."""
        return (
            f"{self.cpu}, {self.cores} cores, {self.threads} threads, {self.instructions}, "
            f"{dtype}; "
            f"Python {self.python}, torch {self.torch}, transformers {self.transformers}, "
            f"kvkeep {self.commit}; load average before: {self.load_average}"
        )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or version("kvkeep")
