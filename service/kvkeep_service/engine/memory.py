"""What running out of memory looks like, and what can be given back at once."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

# As torch's allocator for a CPU words it; it raises a plain RuntimeError.
_CPU_ALLOCATOR = ("not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_ALLOCATOR)


def attempt(call: Callable[[], Result]) -> Result | Exception:
    """What a call returns, or the error it raises."""
    try:
        return call()
    # Whatever it is, it must reach who asked and spare the engine.
    except Exception as error:  # noqa: BLE001
        # Its frames hold tensors, of which the next attempt may need the memory.
        return error.with_traceback(None) if is_out_of_memory(error) else error


def give_back(device: torch.device) -> None:
    """Return to the system, or the device, what is held without being used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
