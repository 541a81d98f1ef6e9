"""One band of a cache as bytes: a safetensors file, and the digests that recognise it.

Storage formats are little-endian, and so are the machines this runs on. ``slab_layout.py``
reads the header back; ``layer_parts.py`` says where a band's rows lie in memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize

from kvkeep_storage.artifact import (
    ITEM_BYTES,
    REMAINDER_NAMES,
    SCALE_NAMES,
    CacheDtype,
    CacheRows,
    Float16Array,
    Int32Array,
    LayerRows,
    Quantization,
    RowBytes,
)
from kvkeep_storage.errors import Invalid

Item = TypeVar("Item", np.uint8, np.int32, np.float16)

_Part: TypeAlias = RowBytes | Int32Array | Float16Array

SLAB_FORMAT = {"format": "kvkeep-slab-1"}

# What is looked at in one step stays in the processor's own cache.
_WORDS_AT_ONCE = 128 * 1024
# The bits of an exponent: a number is infinite or NaN exactly when all of them are set.
_EXPONENT_BITS: dict[str, int] = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}
_FLOAT8_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class SlabDigests:
    """xxh3-128 digests that together cover every byte of a slab.

    ``header_digest`` covers the first ``header_bytes``; ``layer_digests[i]`` covers layer i's
    tensors in the order of ``tensor_names``.
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


class HeadSegment(NamedTuple):
    """``length`` rows of one head, which begin at row ``start`` of a layer in memory."""

    start: int
    length: int


def encode_slab(rows: CacheRows, band: int) -> EncodedSlab:
    """Write one band as a safetensors file in memory. Modifies nothing.

    Raises: Invalid when a row or a remainder holds an infinity or NaN: a build gone wrong must
    not become a stored cache.
    """
    tensors: dict[str, _Part] = {}
    digests: list[str] = []
    for index, layer in enumerate(rows.layers):
        segments = head_segments(rows.counts[:, index], band)
        count = rows.counts[band, index].copy()
        parts: list[_Part] = [count, _gather(layer.position, segments)]
        parts += [_gather(layer.k, segments), _gather(layer.v, segments)]
        parts += _halves(layer, segments, band)
        if layer.remainder is not None:
            parts.extend(layer.remainder[band])
        names = tensor_names(index, rows.quantization, band, has_remainder=rows.has_remainder)
        for name, part in zip(names[2:], parts[2:], strict=True):
            _check_finite(part, rows, name)
        digests.append(digest_of(part.data for part in parts))
        tensors |= dict(zip(names, parts, strict=True))
    content = _serialize(tensors, rows)
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    header_digest = digest_of([memoryview(content)[:header_bytes]])
    return EncodedSlab(
        content, SlabDigests(len(content), header_bytes, header_digest, tuple(digests))
    )


def tensor_names(
    layer: int,
    quantization: Quantization = "none",
    band: int = 0,
    *,
    has_remainder: bool = False,
) -> tuple[str, ...]:
    """Names of a layer's tensors in a band: count, position, k, v, and scales of quantised rows.

    Channel means, which are the same for all bands, lie in the first. The band's own remainder
    comes last, where the cache has them. Names are zero-padded, because safetensors orders by
    dtype, then name: layers lie in order.
    """
    means = ("k_mean",) if quantization == "int4" and band == 0 else ()
    remainder = REMAINDER_NAMES if has_remainder else ()
    parts = ("count", "position", "k", "v", *SCALE_NAMES[quantization], *means, *remainder)
    return tuple(f"layers.{layer:03d}.{part}" for part in parts)


def digest_of(parts: Iterable[memoryview]) -> str:
    """One xxh3-128 over the bytes of contiguous buffers in order, hexadecimal."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def head_segments(counts: Int32Array, band: int) -> tuple[HeadSegment, ...]:
    """Where each head's rows of a band lie in memory, in the order of the slab.

    Shapes: counts int32 [bands, heads] of one layer: every band that memory has room for.
    """
    capacity = counts.sum(axis=0).tolist()
    before = counts[:band].sum(axis=0).tolist()
    segments = []
    run_start = 0
    for head, length in enumerate(counts[band].tolist()):
        segments.append(HeadSegment(run_start + before[head], length))
        run_start += capacity[head]
    return tuple(segments)


def _gather(source: NDArray[Item], segments: Iterable[HeadSegment]) -> NDArray[Item]:
    """Copy the segments of a layer's rows one after the other."""
    return np.concatenate([source[part.start : part.start + part.length] for part in segments])


def _halves(
    layer: LayerRows, segments: tuple[HeadSegment, ...], band: int
) -> Iterator[Float16Array]:
    """The scales of a band of a layer, none where it is not quantised."""
    if layer.scales is None:
        return
    for part in layer.scales.of_rows:
        yield _gather(part, segments)
    if band == 0 and layer.scales.k_mean is not None:
        yield layer.scales.k_mean


def _serialize(tensors: dict[str, _Part], rows: CacheRows) -> bytes:
    """Hand raw pointers to safetensors; ``tensors`` keeps every buffer alive until it returns."""
    specs: dict[str, TensorSpec] = {}
    for name, array in tensors.items():
        # Only bytes that are numbers of the cache's dtype have another shape than their array.
        is_plain = _is_plain(array, rows, name)
        specs[name] = TensorSpec(
            dtype=rows.dtype if is_plain else array.dtype.name,
            shape=_plain_shape(array, rows) if is_plain else list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
    return serialize(specs, SLAB_FORMAT)


def _plain_shape(array: _Part, rows: CacheRows) -> list[int]:
    return [array.shape[0], array.shape[1] // ITEM_BYTES[rows.dtype]]


def _is_plain(part: _Part, rows: CacheRows, name: str) -> bool:
    """Whether a tensor's bytes are numbers of the cache's dtype."""
    if part.dtype != np.uint8:
        return False
    return rows.quantization == "none" or name.endswith(REMAINDER_NAMES)


def _check_finite(part: _Part, rows: CacheRows, name: str) -> None:
    if part.dtype == np.uint8 and not _is_plain(part, rows, name):
        # Every integer is a number once its scale is; e4m3 has a NaN of either sign.
        codes = part.view(np.uint8)
        if rows.quantization == "fp8" and (codes & _FLOAT8_NAN == _FLOAT8_NAN).any():
            raise Invalid(name, "holds a NaN")
        return
    dtype: CacheDtype = "float16" if part.dtype == np.float16 else rows.dtype
    bits = _EXPONENT_BITS[dtype]
    words: NDArray[np.unsignedinteger]
    words = (part.view(np.uint32) if ITEM_BYTES[dtype] == 4 else part.view(np.uint16)).ravel()
    for start in range(0, len(words), _WORDS_AT_ONCE):
        exponents = words[start : start + _WORDS_AT_ONCE] & bits
        if int(exponents.max()) == bits:
            raise Invalid(name, "holds an infinity or NaN")
