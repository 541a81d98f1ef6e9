"""The rows of a compressed cache in memory, and their slabs as safetensors bytes.

In memory a layer is head-major: head 0's whole run, then head 1's, and so on. Inside a run
the protected rows come first, in position order, then all others by falling importance. A
*band* is what one stored ratio adds to every run, so a lower ratio is a prefix of every run.
A *slab* is one band on disk: one valid safetensors file, written by the library.

bf16 has no numpy type, so rows travel as raw bytes (uint8) and are never converted. Those of a
quantised cache are codes: integers of 8 or 4 bits, or floats of 8, with scales beside them.

A *remainder* is a few more rows of each head: what stands for all rows that a ratio evicts. Each
band has its own, since it is another one for each ratio, and of those only one is ever looked at.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvkeep_storage.errors import Invalid

CacheDtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4", "fp8"]
RowBytes: TypeAlias = NDArray[np.uint8]
Int32Array: TypeAlias = NDArray[np.int32]
Float16Array: TypeAlias = NDArray[np.float16]

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
CODE_BITS: dict[str, int] = {"int8": 8, "int4": 4, "fp8": 8}
SCALE_NAMES: dict[str, tuple[str, ...]] = {
    "none": (),
    "int8": ("k_scale", "k_zero", "v_scale", "v_zero"),
    "int4": ("k_scale", "k_zero", "v_scale", "v_zero"),
    "fp8": ("k_scale", "v_scale"),
}
"""What has one number for each row, in the order of a slab. Floats need no zero."""
REMAINDER_NAMES = ("remainder_k", "remainder_v")


def row_bytes(dtype: CacheDtype, quantization: Quantization, head_dim: int) -> int:
    """Size of one row's K, and of its V, without their scales.

    Raises: Invalid for an odd width in 4 bits.
    """
    if quantization == "none":
        return head_dim * ITEM_BYTES[dtype]
    if head_dim * CODE_BITS[quantization] % 8:
        raise Invalid("head_dim", f"must be even for {quantization}, not {head_dim}")
    return head_dim * CODE_BITS[quantization] // 8


@dataclass(frozen=True, slots=True, eq=False)
class LayerScales:
    """What makes numbers of one layer's codes; the kernels say how.

    Shapes: k_scale, k_zero, v_scale, v_zero float16 [rows], the zeros None with fp8; k_mean float16
    [heads, head_dim], with int4 only, and the same for every band.
    """

    k_scale: Float16Array
    k_zero: Float16Array | None
    v_scale: Float16Array
    v_zero: Float16Array | None
    k_mean: Float16Array | None

    @property
    def of_rows(self) -> tuple[Float16Array, ...]:
        """Those with one number a row, in the order of a slab."""
        parts = (self.k_scale, self.k_zero, self.v_scale, self.v_zero)
        return tuple(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """One layer's rows, head-major.

    Shapes: k, v uint8 [rows, row_bytes], C-contiguous; position int32 [rows], the original
    token position of each row. ``scales`` with quantised rows only. remainder uint8
    [bands, 2, heads, remainder_rows * plain_row_bytes], K then V of what stands for the rows that
    bands 0..i leave out: C-contiguous, and in the model's dtype whatever the rows are in.
    """

    k: RowBytes
    v: RowBytes
    position: Int32Array
    scales: LayerScales | None = None
    remainder: RowBytes | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, with their scales and remainders."""
        scales = self.scales.of_rows if self.scales else ()
        remainder_bytes = 0 if self.remainder is None else self.remainder.nbytes
        rows_bytes = self.k.nbytes + self.v.nbytes + sum(part.nbytes for part in scales)
        return rows_bytes + remainder_bytes


@dataclass(frozen=True, slots=True, eq=False)
class CacheRows:
    """A compressed cache: every layer's rows, and how they fall into bands and heads.

    Shapes: counts int32 [bands, layers, heads], the rows each band adds to each head; band 0
    includes the protected rows; protected int32 [layers, heads]. ``ratios`` ascends and names
    the kept fraction that bands 0..i give together. ``dtype`` is the model's, which quantised
    rows were in before. Every layer has a remainder, or none has.
    Raises: Invalid when any shape, dtype, count or position disagrees.
    """

    dtype: CacheDtype
    num_kv_heads: int
    head_dim: int
    ratios: tuple[float, ...]
    counts: Int32Array
    protected: Int32Array
    layers: tuple[LayerRows, ...]
    quantization: Quantization = "none"

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
        """Size of one row's K, and of its V, without their scales."""
        return row_bytes(self.dtype, self.quantization, self.head_dim)

    @property
    def remainder_rows(self) -> int:
        """Rows of each head's remainder, 0 without one: as many in every layer."""
        remainder = self.layers[0].remainder
        if remainder is None or not remainder.ndim:
            return 0
        width: int = remainder.shape[-1]
        return width // row_bytes(self.dtype, "none", self.head_dim)

    @property
    def has_remainder(self) -> bool:
        """Whether something stands for what each ratio leaves out."""
        return self.layers[0].remainder is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of K, V, scales, remainders and positions in memory."""
        return sum(x.kv_bytes + x.position.nbytes for x in self.layers)

    def length(self, layer: int) -> Int32Array:
        """Rows of each head of a layer: int32 [heads]."""
        total: Int32Array = self.counts[:, layer].sum(axis=0, dtype=np.int32)
        return total


def check_ratios(ratios: tuple[float, ...]) -> None:
    """Raises: Invalid unless ratios ascend strictly inside (0, 1]."""
    if not ratios:
        raise Invalid("ratios", "a cache holds at least one band")
    if any(not 0.0 < ratio <= 1.0 for ratio in ratios):
        raise Invalid("ratios", f"each must lie in (0, 1], not {ratios}")
    if any(low >= high for low, high in pairwise(ratios)):
        raise Invalid("ratios", f"must ascend, not {ratios}")


def _check_counts(rows: CacheRows) -> None:
    if rows.dtype not in ITEM_BYTES:
        raise Invalid("dtype", f"must be one of {', '.join(ITEM_BYTES)}, not {rows.dtype!r}")
    if rows.quantization not in ("none", *CODE_BITS):
        raise Invalid("quantization", f"{rows.quantization!r} is not known")
    if rows.num_kv_heads < 1 or rows.head_dim < 1 or not rows.layers:
        raise Invalid("num_kv_heads, head_dim and layers", "at least one of each")
    shape = (len(rows.ratios), len(rows.layers), rows.num_kv_heads)
    if rows.counts.dtype != np.int32 or rows.counts.shape != shape:
        raise Invalid("counts", f"int32 {shape} expected, not {_described(rows.counts)}")
    if rows.protected.dtype != np.int32 or rows.protected.shape != shape[1:]:
        raise Invalid("protected", f"int32 {shape[1:]} expected, not {_described(rows.protected)}")
    if (rows.counts < 0).any() or (rows.protected < 0).any():
        raise Invalid("counts, protected", "never negative")
    if (rows.protected > rows.counts[0]).any():
        raise Invalid("protected", "band 0 holds all protected rows, and here it does not")


def _check_layer(rows: CacheRows, index: int, layer: LayerRows) -> None:
    count = int(rows.counts[:, index].sum())
    expected = (count, rows.row_bytes)
    for name, part in (("k", layer.k), ("v", layer.v)):
        if part.dtype != np.uint8 or part.shape != expected or not part.flags.c_contiguous:
            raise Invalid(
                f"layers.{index:03d}.{name}",
                f"contiguous uint8 {expected} expected, not {_described(part)}",
            )
    position = layer.position
    if position.dtype != np.int32 or position.shape != (count,):
        raise Invalid(
            f"layers.{index:03d}.position",
            f"int32 {(count,)} expected, not {_described(position)}",
        )
    if (position < 0).any():
        raise Invalid(f"layers.{index:03d}.position", "never negative")
    _check_scales(rows, index, layer, count)
    _check_remainder(rows, index, layer)


def _check_scales(rows: CacheRows, index: int, layer: LayerRows, count: int) -> None:
    scales = layer.scales
    if (scales is None) != (rows.quantization == "none"):
        raise Invalid(f"layers.{index:03d}", "scales belong to quantised rows, and only to them")
    if scales is None:
        return
    if (scales.k_zero is None, scales.v_zero is None) != (rows.quantization == "fp8",) * 2:
        raise Invalid(f"layers.{index:03d}", "zeros belong to integers, and only to them")
    for name, part in zip(SCALE_NAMES[rows.quantization], scales.of_rows, strict=True):
        _check_half(f"layers.{index:03d}.{name}", part, (count,))
    if (scales.k_mean is None) != (rows.quantization != "int4"):
        raise Invalid(f"layers.{index:03d}.k_mean", "belongs to int4 rows, and only to them")
    if scales.k_mean is not None:
        shape = (rows.num_kv_heads, rows.head_dim)
        _check_half(f"layers.{index:03d}.k_mean", scales.k_mean, shape)


def _check_remainder(rows: CacheRows, index: int, layer: LayerRows) -> None:
    part = layer.remainder
    name = f"layers.{index:03d}.remainder"
    if (part is not None) != rows.has_remainder:
        raise Invalid(name, "every layer has one, or none has")
    if part is None:
        return
    plain_row_bytes = row_bytes(rows.dtype, "none", rows.head_dim)
    count = rows.remainder_rows
    expected = (len(rows.ratios), 2, rows.num_kv_heads, max(1, count) * plain_row_bytes)
    if part.dtype != np.uint8 or part.shape != expected or not part.flags.c_contiguous:
        raise Invalid(name, f"contiguous uint8 {expected} expected, not {_described(part)}")


def _check_half(name: str, part: Float16Array, shape: tuple[int, ...]) -> None:
    if part.dtype != np.float16 or part.shape != shape or not part.flags.c_contiguous:
        raise Invalid(name, f"contiguous float16 {shape} expected, not {_described(part)}")


def _described(array: RowBytes | Int32Array | Float16Array) -> str:
    return f"{array.dtype} {array.shape}"
