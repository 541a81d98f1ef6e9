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
    return [
        _part(counts[:, index], layer, band, index)
        for band in bands
        for index, layer in enumerate(layers)
    ]


def _part(counts: Int32Array, layer: LayerRows, band: int, index: int) -> LayerPart:
    segments = head_segments(counts, band)
    count = np.empty(counts.shape[1], np.int32)
    tensors = (
        [_bytes_of(count)],
        *(_places(tensor, segments) for tensor in (layer.position, layer.k, layer.v)),
    )
    return LayerPart(band, index, count, tensors)


def _places(tensor: NDArray[np.generic], segments: Iterable[HeadSegment]) -> list[memoryview]:
    if not tensor.size:
        return []
    content, row_bytes = _bytes_of(tensor), tensor.nbytes // len(tensor)
    return [
        content[part.start * row_bytes : (part.start + part.length) * row_bytes]
        for part in segments
        if part.length
    ]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    return array.data.cast("B")
