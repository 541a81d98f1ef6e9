"""The rows of a compressed cache in memory, and their slabs as safetensors bytes.

In memory a layer is head-major: head 0's whole run, then head 1's, and so on. Inside a run
the protected rows come first, in position order, then all others by falling importance. A
*band* is what one stored ratio adds to every run, so a lower ratio is a prefix of every run.
A *slab* is one band on disk: one valid safetensors file, written by the library.

bf16 has no numpy type, so rows travel as raw bytes (uint8) and are never converted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize

CacheDtype = Literal["float32", "bfloat16", "float16"]
RowBytes: TypeAlias = NDArray[np.uint8]
Int32Array: TypeAlias = NDArray[np.int32]

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
SLAB_FORMAT = {"format": "kvkeep-slab-1"}

# The bits of an exponent: a number is infinite or NaN exactly when all of them are set.
_EXPONENT_BITS: dict[str, int] = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00}


class ArtifactInvalid(ValueError):
    """Rows that must not be stored or handed on; names the layer and the broken rule."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """One layer's rows, head-major.

    Shapes: k, v uint8 [rows, row_bytes], C-contiguous; position int32 [rows], the original
    token position of each row.
    """

    k: RowBytes
    v: RowBytes
    position: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class CacheRows:
    """A compressed cache: every layer's rows, and how they fall into bands and heads.

    Shapes: counts int32 [bands, layers, heads], the rows each band adds to each head; band 0
    includes the protected rows; protected int32 [layers, heads]. ``ratios`` ascends and names
    the kept fraction that bands 0..i give together.
    Raises: ArtifactInvalid when any shape, dtype, count or position disagrees.
    """

    dtype: CacheDtype
    num_kv_heads: int
    head_dim: int
    ratios: tuple[float, ...]
    counts: Int32Array
    protected: Int32Array
    layers: tuple[LayerRows, ...]

    def __post_init__(self) -> None:
        """Check everything once; nothing later looks again."""
        check_ratios(self.ratios)
        _check_counts(self)
        for index, layer in enumerate(self.layers):
            _check_layer(self, index, layer)

    @property
    def num_layers(self) -> int:
        """How many layers the cache holds."""
        return len(self.layers)

    @property
    def row_bytes(self) -> int:
        """Size of one row's K, and of its V."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of K, V and positions in memory."""
        return sum(x.k.nbytes + x.v.nbytes + x.position.nbytes for x in self.layers)

    def length(self, layer: int) -> Int32Array:
        """Rows of each head of a layer: int32 [heads]."""
        return self.counts[:, layer].sum(axis=0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class EncodedSlab:
    """One slab's file content and the digests that the manifest keeps.

    ``header_digest`` covers the first ``header_bytes``; ``layer_digests[i]`` covers layer i's
    count, position, k and v, in that order. Together they cover every byte.
    """

    content: bytes
    header_bytes: int
    header_digest: str
    layer_digests: tuple[str, ...]


def encode_slab(rows: CacheRows, band: int) -> EncodedSlab:
    """Write one band as a safetensors file in memory. Modifies nothing.

    Raises: ArtifactInvalid when a row holds an infinity or NaN: a build gone wrong must not
    become a stored cache.
    """
    tensors: dict[str, NDArray[np.uint8] | Int32Array] = {}
    digests: list[str] = []
    for index, layer in enumerate(rows.layers):
        kept = _band_rows(rows, index, band)
        parts = (
            rows.counts[band, index].copy(),
            layer.position[kept],
            layer.k[kept],
            layer.v[kept],
        )
        for name, part in zip(("k", "v"), parts[2:], strict=True):
            _check_finite(part, rows.dtype, f"layers.{index:03d}.{name}")
        digests.append(digest(*parts))
        tensors |= dict(zip(tensor_names(index), parts, strict=True))
    content = _serialize(tensors, rows)
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    header_digest = digest(content[:header_bytes])
    return EncodedSlab(content, header_bytes, header_digest, tuple(digests))


def tensor_names(layer: int) -> tuple[str, str, str, str]:
    """Names of a layer's tensors: count, position, k, v.

    Zero-padded, because safetensors orders by dtype, then name: layers lie in order.
    """
    stem = f"layers.{layer:03d}"
    return f"{stem}.count", f"{stem}.position", f"{stem}.k", f"{stem}.v"


def digest(*parts: NDArray[np.uint8] | Int32Array | bytes | memoryview) -> str:
    """Return one xxh3-128, hexadecimal, over the parts' bytes in order (against accidents)."""
    state = xxhash.xxh3_128()
    for part in parts:
        # An empty array has no memory that could be exported.
        if len(part):
            state.update(part)
    return state.hexdigest()


def head_segments(counts: Int32Array, band: int) -> Iterator["HeadSegment"]:
    """Yield where each head's rows of a band lie. counts: int32 [bands, heads] of one layer."""
    run_start, band_start = 0, 0
    for head in range(counts.shape[1]):
        before, length = int(counts[:band, head].sum()), int(counts[band, head])
        yield HeadSegment(run_start + before, band_start, length)
        run_start += int(counts[:, head].sum())
        band_start += length


@dataclass(frozen=True, slots=True)
class HeadSegment:
    """``length`` rows of one head: at ``row_start`` in memory, at ``band_start`` in the slab."""

    row_start: int
    band_start: int
    length: int


def check_ratios(ratios: tuple[float, ...]) -> None:
    """Raises: ArtifactInvalid unless ratios ascend strictly inside (0, 1]."""
    if not ratios:
        raise ArtifactInvalid("ratios: a cache holds at least one band")
    if any(not 0.0 < ratio <= 1.0 for ratio in ratios):
        raise ArtifactInvalid(f"ratios: each must lie in (0, 1], not {ratios}")
    if any(low >= high for low, high in zip(ratios, ratios[1:], strict=False)):
        raise ArtifactInvalid(f"ratios: must ascend, not {ratios}")


def _band_rows(rows: CacheRows, layer: int, band: int) -> NDArray[np.intp]:
    """Row numbers of a band in memory order: head after head, importance descending."""
    segments = head_segments(rows.counts[:, layer], band)
    return np.concatenate(
        [np.arange(s.row_start, s.row_start + s.length, dtype=np.intp) for s in segments]
    )


def _serialize(tensors: dict[str, NDArray[np.uint8] | Int32Array], rows: CacheRows) -> bytes:
    """Hand raw pointers to safetensors; ``tensors`` keeps every buffer alive until it returns."""
    specs: dict[str, TensorSpec] = {}
    for name, array in tensors.items():
        is_row = array.dtype == np.uint8
        shape = [array.shape[0], rows.head_dim] if is_row else list(array.shape)
        specs[name] = TensorSpec(
            dtype=rows.dtype if is_row else "int32",
            shape=shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
    return serialize(specs, SLAB_FORMAT)


def _check_finite(part: NDArray[np.uint8] | Int32Array, dtype: CacheDtype, name: str) -> None:
    bits = _EXPONENT_BITS[dtype]
    words = part.view(np.uint32 if ITEM_BYTES[dtype] == 4 else np.uint16)
    if bool(np.any((words & bits) == bits)):
        raise ArtifactInvalid(f"{name} holds an infinity or NaN")


def _check_counts(rows: CacheRows) -> None:
    if rows.dtype not in ITEM_BYTES:
        raise ArtifactInvalid(f"dtype: must be one of {', '.join(ITEM_BYTES)}, not {rows.dtype!r}")
    if rows.num_kv_heads < 1 or rows.head_dim < 1 or not rows.layers:
        raise ArtifactInvalid("num_kv_heads, head_dim and layers: at least one of each")
    shape = (len(rows.ratios), len(rows.layers), rows.num_kv_heads)
    if rows.counts.dtype != np.int32 or rows.counts.shape != shape:
        raise ArtifactInvalid(f"counts: int32 {shape} expected, not {_described(rows.counts)}")
    if rows.protected.dtype != np.int32 or rows.protected.shape != shape[1:]:
        raise ArtifactInvalid(
            f"protected: int32 {shape[1:]} expected, not {_described(rows.protected)}"
        )
    if (rows.counts < 0).any() or (rows.protected < 0).any():
        raise ArtifactInvalid("counts, protected: never negative")
    if (rows.protected > rows.counts[0]).any():
        raise ArtifactInvalid("protected: band 0 holds all protected rows, and here it does not")


def _check_layer(rows: CacheRows, index: int, layer: LayerRows) -> None:
    count = int(rows.counts[:, index].sum())
    expected = (count, rows.row_bytes)
    for name, part in (("k", layer.k), ("v", layer.v)):
        if part.dtype != np.uint8 or part.shape != expected or not part.flags.c_contiguous:
            raise ArtifactInvalid(
                f"layers.{index:03d}.{name}: contiguous uint8 {expected} expected,"
                f" not {_described(part)}"
            )
    position = layer.position
    if position.dtype != np.int32 or position.shape != (count,):
        raise ArtifactInvalid(
            f"layers.{index:03d}.position: int32 {(count,)} expected, not {_described(position)}"
        )
    if (position < 0).any():
        raise ArtifactInvalid(f"layers.{index:03d}.position: never negative")


def _described(array: NDArray[np.uint8] | Int32Array) -> str:
    return f"{array.dtype} {array.shape}"
