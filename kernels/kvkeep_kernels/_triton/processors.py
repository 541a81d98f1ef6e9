"""What a launch must know about its device: how many programs fill it, and where rows may lie."""

from functools import cache

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
"""Rows start at multiples of this, so that a thread loads as much as it can at once."""

_INTERPRETER_PROCESSORS = 3


@cache
def processor_count(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; a small number in the interpreter."""
    if device.type == "cpu":
        return _INTERPRETER_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def addressable(rows: Tensor) -> Tensor:
    """``rows`` itself where a kernel may read it by address, else an aligned copy.

    Shapes: rows [..., head_dim], each row contiguous in the result. Torch's own buffers and
    their slices of whole rows come back as they are.
    """
    size_bytes = rows.element_size()
    steps = (stride * size_bytes % ALIGNMENT_BYTES for stride in rows.stride()[:-1])
    is_aligned = rows.data_ptr() % ALIGNMENT_BYTES == 0 and not any(steps)
    return rows if is_aligned and rows.stride(-1) == 1 else rows.contiguous().clone()
