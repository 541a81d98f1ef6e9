"""One layer of one slab as it lies in memory: head by head, each in its own run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvkeep_storage.artifact import Int32Array, LayerRows
from kvkeep_storage.errors import Corrupt
from kvkeep_storage.slab import HeadSegment, digest_of, head_segments


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
    """Room for every row of a cache, not yet filled. counts: int32 [bands, layers, heads]."""
    layers = []
    for rows in counts.sum(axis=(0, 2)).tolist():
        k, v = np.empty((rows, row_bytes), np.uint8), np.empty((rows, row_bytes), np.uint8)
        layers.append(LayerRows(k, v, np.empty(rows, np.int32)))
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


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    return array.data.cast("B")
