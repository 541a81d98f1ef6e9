"""One layer of one slab as it lies in memory: head by head, each in its own run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvkeep_storage.artifact import (
    SCALE_NAMES,
    Int32Array,
    LayerRows,
    LayerScales,
    Quantization,
    RowBytes,
)
from kvkeep_storage.errors import Corrupt
from kvkeep_storage.spare_memory import Room, new_room

# Each tensor begins where a vector instruction likes it.
_ALIGNMENT = 64
_HALF_BYTES = 2

# Which of a part's tensors are K and V: nearly all of its bytes.
ROW_TENSORS = range(2, 4)


@dataclass(frozen=True, slots=True, eq=False)
class LayerPart:
    """Where the bytes of one layer of one slab belong.

    ``tensors`` are the places of a layer's tensors, in the order of a slab, each a list of
    writable views of bytes that together hold the tensor, ``sizes`` bytes of it. Count has a
    buffer of its own: int32 [heads].
    """

    band: int
    layer: int
    count: Int32Array
    tensors: tuple[Sequence[memoryview], ...]
    sizes: tuple[int, ...]

    def check(self, found: str, digest: str, expected: Int32Array) -> None:
        """Check what has arrived: its digest, which is ``found``, and its counts.

        ``digest`` and ``expected``, int32 [heads], are the manifest's.
        Raises: Corrupt; its reason tells one set of wrong bytes from another.
        """
        if found != digest:
            raise Corrupt(f"layer {self.layer}", f"its digest is {found}, not {digest}")
        if self.count.tobytes() != expected.tobytes():
            raise Corrupt(f"layer {self.layer}", "its counts differ from the manifest's")


def empty_layers(
    counts: Int32Array,
    row_bytes: int,
    quantization: Quantization = "none",
    room_for: Room = new_room,
    *,
    remainder_row_bytes: int = 0,
) -> tuple[LayerRows, ...]:
    """Room for every row of a cache, not yet filled. counts: int32 [bands, layers, heads].

    ``remainder_row_bytes``: of K, and of V, of one head's remainder; 0 where a cache has none.
    One piece of memory for all of it: the kernel gives large ones in large pages, and to touch
    new memory in small ones costs more than to read a file into it.
    """
    # Two codes lie in each byte of a row of int4.
    bands, _, heads = counts.shape
    mean_bytes = heads * 2 * row_bytes * _HALF_BYTES if quantization == "int4" else 0
    remainder_bytes = bands * 2 * heads * remainder_row_bytes
    layer_sizes = []
    for rows in counts.sum(axis=(0, 2)).tolist():
        sizes = [rows * row_bytes, rows * row_bytes, rows * 4]
        sizes += [rows * _HALF_BYTES] * len(SCALE_NAMES[quantization])
        sizes += [mean_bytes, remainder_bytes]
        layer_sizes.append(sizes)
    room_bytes = sum(_aligned(size) for sizes in layer_sizes for size in sizes)
    room = room_for(room_bytes + _ALIGNMENT)
    start = -room.ctypes.data % _ALIGNMENT
    layers = []
    for sizes in layer_sizes:
        parts = []
        for size_bytes in sizes:
            parts.append(room[start : start + size_bytes])
            start += _aligned(size_bytes)
        k, v = (part.reshape(-1, row_bytes) for part in parts[:2])
        scales = _scales(parts[3:-1], heads, quantization)
        remainder = parts[-1].reshape(bands, 2, heads, -1) if remainder_bytes else None
        layers.append(LayerRows(k, v, parts[2].view(np.int32), scales, remainder))
    return tuple(layers)


def _scales(
    parts: Sequence[RowBytes], heads: int, quantization: Quantization
) -> LayerScales | None:
    if quantization == "none":
        return None
    *of_rows, mean = (part.view(np.float16) for part in parts)
    named = dict(zip(SCALE_NAMES[quantization], of_rows, strict=True))
    return LayerScales(
        k_scale=named["k_scale"],
        k_zero=named.get("k_zero"),
        v_scale=named["v_scale"],
        v_zero=named.get("v_zero"),
        k_mean=mean.reshape(heads, -1) if mean.size else None,
    )


def layer_parts(
    counts: Int32Array, layers: Sequence[LayerRows], bands: Iterable[int]
) -> list[LayerPart]:
    """Every layer of some bands, as places in ``layers``.

    Shapes: counts int32 [bands, layers, heads] of every band that ``layers`` has room for.
    """
    tensors = [[_Tensor(part) for part in _of_rows(layer)] for layer in layers]
    starts, ends = _runs(counts)
    return [
        _part(
            (band, index),
            (starts[band][index], ends[band][index]),
            places,
            _beside_rows(layers[index], band),
        )
        for band in bands
        for index, places in enumerate(tensors)
    ]


_Rows: TypeAlias = list[list[list[int]]]


def _runs(counts: Int32Array) -> tuple[_Rows, _Rows]:
    """First row of each head's run in memory, and the one behind it; [bands][layers][heads].

    The same as ``head_segments``, for all at once.
    """
    capacity = counts.sum(axis=0, dtype=np.int64)
    heads = np.cumsum(capacity, axis=1) - capacity
    ends = heads + np.cumsum(counts, axis=0, dtype=np.int64)
    return (ends - counts).tolist(), ends.tolist()


def _of_rows(layer: LayerRows) -> Iterator[NDArray[np.generic]]:
    """Whatever has one entry a row, in the order of a slab."""
    yield from (layer.position, layer.k, layer.v)
    if layer.scales is not None:
        yield from layer.scales.of_rows


def _beside_rows(layer: LayerRows, band: int) -> Iterator[NDArray[np.generic]]:
    """Whatever of a band has no entry a row, in the order of a slab."""
    if band == 0 and layer.scales is not None and layer.scales.k_mean is not None:
        yield layer.scales.k_mean
    if layer.remainder is not None:
        yield from layer.remainder[band]


class _Tensor:
    """The bytes of one tensor, by rows."""

    def __init__(self, tensor: NDArray[np.generic]) -> None:
        self._bytes = _bytes_of(tensor) if tensor.size else memoryview(b"")
        self.row_bytes = tensor.nbytes // max(1, len(tensor))

    def views(self, segments: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Those of some rows, each given by its first and by the one behind its last."""
        content, size = self._bytes, self.row_bytes
        return [content[start * size : end * size] for start, end in segments]


def _part(
    number: tuple[int, int],
    runs: tuple[list[int], list[int]],
    tensors: Sequence[_Tensor],
    beside: Iterable[NDArray[np.generic]],
) -> LayerPart:
    band, layer = number
    count = np.empty(len(runs[0]), np.int32)
    segments = [(start, end) for start, end in zip(*runs, strict=True) if start < end]
    rows = sum(end - start for start, end in segments)
    places = [[_bytes_of(count)], *(tensor.views(segments) for tensor in tensors)]
    sizes = [count.nbytes, *(rows * tensor.row_bytes for tensor in tensors)]
    for tensor in beside:
        places.append([_bytes_of(tensor)])
        sizes.append(tensor.nbytes)
    return LayerPart(band, layer, count, tuple(places), tuple(sizes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    return array.data.cast("B")
