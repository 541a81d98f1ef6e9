"""How much memory the engine may use when nobody said: a share of what is free at the start."""

from pathlib import Path
from typing import Final

import torch

SHARE: Final = 0.9
"""The rest is for what is not counted: activations of answers, buffers of the HTTP side."""

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def engine_memory_bytes(device: torch.device) -> int | None:
    """Bytes for caches, builds and tails on a device; None where it cannot be told.

    To be asked once the model is loaded. On a CPU the limit of the container counts too.
    """
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    free = [found for found in (_free_of_machine(), _free_of_container()) if found is not None]
    return int(SHARE * min(free)) if free else None


def _free_of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kibibytes[0]) if kibibytes else None


def _free_of_container() -> int | None:
    """What a cgroup (version 2) leaves; files in its page cache count as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
