"""One band of a cache as bytes: written by safetensors, verified before it is scattered.

Storage formats are little-endian, and so are the machines this runs on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import TensorSpec, serialize

from kvkeep_storage.artifact import (
    ITEM_BYTES,
    CacheDtype,
    CacheRows,
    Int32Array,
    LayerRows,
    RowBytes,
)
from kvkeep_storage.errors import Corrupt, Invalid

SLAB_FORMAT = {"format": "kvkeep-slab-1"}

# The bits of an exponent: a number is infinite or NaN exactly when all of them are set.
_EXPONENT_BITS: dict[str, int] = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
_DTYPE_NAMES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class SlabDigests:
    """xxh3-128 digests that together cover every byte of a slab.

    ``header_digest`` covers the first ``header_bytes``; ``layer_digests[i]`` covers layer i's
    count, position, k and v, in that order.
    """

    size_bytes: int
    header_bytes: int
    header_digest: str
    layer_digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EncodedSlab:
    """One slab's file content and its digests."""

    content: bytes
    digests: SlabDigests


@dataclass(frozen=True, slots=True)
class HeadSegment:
    """``length`` rows of one head: at ``row_start`` in memory, at ``band_start`` in the slab."""

    row_start: int
    band_start: int
    length: int


def encode_slab(rows: CacheRows, band: int) -> EncodedSlab:
    """Write one band as a safetensors file in memory. Modifies nothing.

    Raises: Invalid when a row holds an infinity or NaN: a build gone wrong must not
    become a stored cache.
    """
    tensors: dict[str, RowBytes | Int32Array] = {}
    digests: list[str] = []
    for index, layer in enumerate(rows.layers):
        kept = _band_rows(rows.counts[:, index], band)
        k, v = layer.k[kept], layer.v[kept]
        parts = (rows.counts[band, index].copy(), layer.position[kept], k, v)
        names = tensor_names(index)
        _check_finite(k, rows.dtype, names[2])
        _check_finite(v, rows.dtype, names[3])
        digests.append(_digest(*parts))
        tensors |= dict(zip(names, parts, strict=True))
    content = _serialize(tensors, rows)
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    header_digest = _digest(np.frombuffer(content, np.uint8, header_bytes))
    return EncodedSlab(
        content, SlabDigests(len(content), header_bytes, header_digest, tuple(digests))
    )


def verify_slab(
    content: RowBytes, digests: SlabDigests, counts: Int32Array, dtype: CacheDtype, head_dim: int
) -> tuple[LayerRows, ...]:
    """Check every byte of a slab before anything uses it.

    Shapes: content uint8 [size_bytes]; counts int32 [layers, heads], what the manifest says.
    Returns one view per layer, no copies: ``content`` must not change while they are in use.
    Raises: Corrupt.
    """
    if len(content) != digests.size_bytes:
        raise Corrupt("size", f"{len(content)} bytes, not {digests.size_bytes}")
    if _digest(content[: digests.header_bytes]) != digests.header_digest:
        raise Corrupt("header", "its digest differs")
    header = _parse_header(content, digests.header_bytes)
    layers = []
    for index in range(len(counts)):
        count, layer = _layer_views(header, index, counts[index], dtype, head_dim)
        if _digest(count, layer.position, layer.k, layer.v) != digests.layer_digests[index]:
            raise Corrupt(f"layer {index}", "its digest differs")
        if not np.array_equal(count, counts[index]):
            raise Corrupt(f"layer {index}", "its counts differ from the manifest's")
        layers.append(layer)
    return tuple(layers)


def empty_layers(counts: Int32Array, row_bytes: int) -> tuple[LayerRows, ...]:
    """Room for every row of a cache, not yet filled. counts: int32 [bands, layers, heads]."""
    layers = []
    for rows in counts.sum(axis=(0, 2)).tolist():
        k, v = np.empty((rows, row_bytes), np.uint8), np.empty((rows, row_bytes), np.uint8)
        layers.append(LayerRows(k, v, np.empty(rows, np.int32)))
    return tuple(layers)


def scatter_slab(
    slab: tuple[LayerRows, ...], band: int, counts: Int32Array, into: tuple[LayerRows, ...]
) -> None:
    """Copy a verified band's rows to their places in every head's run.

    Shapes: counts int32 [bands, layers, heads] of the bands that ``into`` has room for.
    Modifies: the rows of this band in ``into``, no others.
    """
    for index, (source, target) in enumerate(zip(slab, into, strict=True)):
        for segment in _head_segments(counts[:, index], band):
            here = slice(segment.row_start, segment.row_start + segment.length)
            there = slice(segment.band_start, segment.band_start + segment.length)
            target.k[here] = source.k[there]
            target.v[here] = source.v[there]
            target.position[here] = source.position[there]


def tensor_names(layer: int) -> tuple[str, str, str, str]:
    """Names of a layer's tensors: count, position, k, v.

    Zero-padded, because safetensors orders by dtype, then name: layers lie in order.
    """
    stem = f"layers.{layer:03d}"
    return f"{stem}.count", f"{stem}.position", f"{stem}.k", f"{stem}.v"


def _digest(*parts: RowBytes | Int32Array) -> str:
    """Return one xxh3-128 over the parts' bytes in order."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part.data)
    return state.hexdigest()


def _head_segments(counts: Int32Array, band: int) -> Iterator[HeadSegment]:
    """Yield where each head's rows of a band lie. counts: int32 [bands, heads] of one layer."""
    capacity = counts.sum(axis=0).tolist()
    before = counts[:band].sum(axis=0).tolist()
    run_start, band_start = 0, 0
    for head, length in enumerate(counts[band].tolist()):
        yield HeadSegment(run_start + before[head], band_start, length)
        run_start += capacity[head]
        band_start += length


def _band_rows(counts: Int32Array, band: int) -> NDArray[np.intp]:
    """Row numbers of a band in memory order: head after head, importance descending."""
    segments = _head_segments(counts, band)
    return np.concatenate(
        [np.arange(s.row_start, s.row_start + s.length, dtype=np.intp) for s in segments]
    )


def _serialize(tensors: dict[str, RowBytes | Int32Array], rows: CacheRows) -> bytes:
    """Hand raw pointers to safetensors; ``tensors`` keeps every buffer alive until it returns."""
    specs: dict[str, TensorSpec] = {}
    for name, array in tensors.items():
        is_row = array.dtype == np.uint8
        specs[name] = TensorSpec(
            dtype=rows.dtype if is_row else "int32",
            shape=[array.shape[0], rows.head_dim] if is_row else list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
    return serialize(specs, SLAB_FORMAT)


def _check_finite(part: RowBytes, dtype: CacheDtype, name: str) -> None:
    bits = _EXPONENT_BITS[dtype]
    words: NDArray[np.unsignedinteger]
    words = part.view(np.uint32) if ITEM_BYTES[dtype] == 4 else part.view(np.uint16)
    if bool(np.any(np.bitwise_and(words, bits) == bits)):
        raise Invalid(name, "holds an infinity or NaN")


class _TensorEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: Annotated[list[int], Field(max_length=2)]
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]


_HEADER = TypeAdapter(dict[str, _TensorEntry | dict[str, str]])


@dataclass(frozen=True, slots=True)
class _Header:
    """The tensors of a slab, and the bytes that follow its header."""

    entries: dict[str, _TensorEntry]
    data: RowBytes

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> RowBytes:
        """Return the bytes of a tensor. Raises: Corrupt when it is not as expected."""
        entry = self.entries.get(name)
        if entry is None or entry.dtype != dtype or tuple(entry.shape) != shape:
            raise Corrupt(name, f"{dtype} {shape} expected, the header says {entry}")
        start, end = entry.data_offsets
        if not 0 <= start <= end <= len(self.data):
            raise Corrupt(name, f"bytes {start} to {end} lie outside the file")
        return self.data[start:end]


def _layer_views(
    header: _Header, index: int, counts: Int32Array, dtype: CacheDtype, head_dim: int
) -> tuple[Int32Array, LayerRows]:
    """Return one layer's counts and rows as views into the file."""
    row_bytes = head_dim * ITEM_BYTES[dtype]
    rows = int(counts.sum())
    names = tensor_names(index)
    count = header.tensor(names[0], "I32", counts.shape).view(np.int32)
    position = header.tensor(names[1], "I32", (rows,)).view(np.int32)
    k = header.tensor(names[2], _DTYPE_NAMES[dtype], (rows, head_dim)).reshape(rows, row_bytes)
    v = header.tensor(names[3], _DTYPE_NAMES[dtype], (rows, head_dim)).reshape(rows, row_bytes)
    return count, LayerRows(k, v, position)


def _parse_header(content: RowBytes, header_bytes: int) -> _Header:
    """Read the header of a slab whose header digest has matched. Raises: Corrupt."""
    try:
        entries = _HEADER.validate_json(content[8:header_bytes].tobytes())
    except ValidationError as error:
        raise Corrupt("header", "not one that safetensors writes") from error
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, _TensorEntry)}
    return _Header(tensors, content[header_bytes:])
