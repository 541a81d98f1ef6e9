"""What in a piece of code would make the host wait for a GPU, seen where there is none.

On a CPU every tensor is the host's, and nothing waits; but the calls are the same ones.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# What reads a number, or makes a tensor whose size depends on numbers.
READING = {
    _aten._local_scalar_dense,
    _aten.item,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.nonzero_static,
    _aten.masked_select,
    _aten.equal,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
    _aten.bincount,
    _aten.repeat_interleave,
    _aten._assert_async,
}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
# ``tolist`` and ``numpy`` read a host's tensor without an operation.
_METHODS = {
    getattr(Tensor, name)
    for name in (
        *("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__"),
        *("__array__", "__len__", "__contains__", "nonzero"),
    )
} - {Tensor.__len__}


class HostSyncs:
    """Within it, notes what would wait. ``literals``: tensors made of the host's own numbers."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.literals = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Functions(TorchFunctionMode):
    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function in _METHODS:
            self._syncs.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        packet = operation.overloadpacket
        if packet in READING:
            self._syncs.seen.append(str(packet))
        if packet in _INDEXING and any(_is_mask(index) for index in args[1]):
            self._syncs.seen.append(f"{packet} by a mask")
        if packet is _aten.lift_fresh:
            self._syncs.literals += 1
        return operation(*args, **(kwargs or {}))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in {torch.bool, torch.uint8}
