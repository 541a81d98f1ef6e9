"""One layer of one slab as it lies in memory: head by head, each in its own run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvkeep_storage.artifact import Int32Array, LayerRows
from kvkeep_storage.errors import Corrupt
from kvkeep_storage.slab import HeadSegment, digest_of, head_segments

# Each tensor begins where a vector instruction likes it.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class LayerPart:
    """Where the bytes of one layer of one slab belong.

    ``tensors`` are the places of count, position, k and v, in this order, each a list of
    writable views of bytes that together hold the tensor. Count has a buffer of its own:
    int32 [heads].
    """

    band: int
    layer: int
    count: Int32Array
    tensors: tuple[Sequence[memoryview], ...]

    def verify(self, digest: str, expected: Int32Array) -> None:
        """Check the bytes where they lie. ``expected`` is the manifest's count: int32 [heads].

        Raises: Corrupt; its reason tells one set of wrong bytes from another.
        """
        found = digest_of(chain.from_iterable(self.tensors))
        if found != digest:
            raise Corrupt(f"layer {self.layer}", f"its digest is {found}, not {digest}")
        if not np.array_equal(self.count, expected):
            raise Corrupt(f"layer {self.layer}", "its counts differ from the manifest's")


def empty_layers(counts: Int32Array, row_bytes: int) -> tuple[LayerRows, ...]:
    """Room for every row of a cache, not yet filled. counts: int32 [bands, layers, heads].

    One piece of memory for all of it: the kernel gives large ones in large pages, and to touch
    new memory in small ones costs more than to read a file into it.
    """
    layer_rows: list[int] = counts.sum(axis=(0, 2)).tolist()
    room_bytes = sum(2 * _aligned(rows * row_bytes) + _aligned(rows * 4) for rows in layer_rows)
    room = np.empty(room_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    layers = []
    for rows in layer_rows:
        parts = []
        for size_bytes in (rows * row_bytes, rows * row_bytes, rows * 4):
            parts.append(room[start : start + size_bytes])
            start += _aligned(size_bytes)
        k, v = (part.reshape(rows, row_bytes) for part in parts[:2])
        layers.append(LayerRows(k, v, parts[2].view(np.int32)))
    return tuple(layers)


def layer_parts(
    counts: Int32Array, layers: Sequence[LayerRows], bands: Iterable[int]
) -> list[LayerPart]:
    """Every layer of some bands, as places in ``layers``.

    Shapes: counts int32 [bands, layers, heads] of every band that ``layers`` has room for.
    """
    tensors = [[_Tensor(part) for part in (x.position, x.k, x.v)] for x in layers]
    return [
        _part(counts[:, index], places, band, index)
        for band in bands
        for index, places in enumerate(tensors)
    ]


class _Tensor:
    """The bytes of one tensor, by rows."""

    def __init__(self, tensor: NDArray[np.generic]) -> None:
        self._bytes = _bytes_of(tensor) if tensor.size else memoryview(b"")
        self._row_bytes = tensor.nbytes // max(1, len(tensor))

    def views(self, segments: Iterable[HeadSegment]) -> list[memoryview]:
        content, size = self._bytes, self._row_bytes
        return [
            content[start * size : (start + length) * size] for start, length in segments if length
        ]


def _part(counts: Int32Array, tensors: Iterable[_Tensor], band: int, index: int) -> LayerPart:
    segments = head_segments(counts, band)
    count = np.empty(counts.shape[1], np.int32)
    places = (tensor.views(segments) for tensor in tensors)
    return LayerPart(band, index, count, ([_bytes_of(count)], *places))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    return array.data.cast("B")
