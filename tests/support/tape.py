"""A graph of a GPU, without the GPU: what was done is done again, on the same memory.

As a CUDA graph, a tape knows the operations that were recorded, the numbers they were handed and
where their operands lie; and as there, nothing is looked at again. What may not be captured is
refused while recording. Only for the interpreter, whose launches are on the tape too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kvkeep_service.engine.graphs import Captured

from .host_syncs import READING

_aten = torch.ops.aten
# Numbers of the host that become a tensor: a graph would copy from memory that is somebody else's.
_FROM_HOST = {_aten.lift_fresh, _aten.pin_memory, _aten._pin_memory}
_UNINITIALISED = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}


class NotCapturable(Exception):
    """A captured call asks the device something, or brings numbers from the host."""


class Tape(TorchDispatchMode):
    """What a call did. Within it, records and does it."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = operation.overloadpacket
        if packet in READING or packet in _FROM_HOST:
            raise NotCapturable(str(operation))
        out = operation(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]

        def again() -> None:
            if packet in _UNINITIALISED:
                for tensor in tensors:
                    _poison(tensor)
                return
            found = operation(*args, **kwargs)
            fresh = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            for tensor, new in zip(tensors, fresh, strict=True):
                if not _is_same_memory(tensor, new):
                    tensor.copy_(new)

        self.entries.append(again)
        self.names.append(str(operation))
        return out

    def launch(self, kernel: InterpretedFunction, args: Any, grid: Any, kwargs: Any) -> None:
        """Record and do a launch."""

        def again() -> None:
            STOCK_RUN(kernel, *args, grid=grid, warmup=False, **kwargs)

        self.entries.append(again)
        self.names.append(f"{kernel.__name__}{grid}")
        with torch.utils._python_dispatch._disable_current_modes():
            again()

    def replay(self) -> None:
        """Do all of it again."""
        with torch.inference_mode():
            for again in self.entries:
                again()


STOCK_RUN: Callable[..., None] = InterpretedFunction.run


@contextmanager
def _launches_on(tape: Tape) -> Iterator[None]:
    def run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert not warmup
        tape.launch(self, args, grid, kwargs)

    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = STOCK_RUN


class TapeCapture:
    """A ``Capture`` that records tapes. ``tapes``: all of them, the latest last."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        tape = Tape()
        with _launches_on(tape), tape:
            logits = run()
        self.tapes.append(tape)
        return Captured(tape.replay, logits, logits.nbytes)


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
