"""The rows of a compressed cache in memory, and their slabs as safetensors bytes.

In memory a layer is head-major: head 0's whole run, then head 1's, and so on. Inside a run
the protected rows come first, in position order, then all others by falling importance. A
*band* is what one stored ratio adds to every run, so a lower ratio is a prefix of every run.
A *slab* is one band on disk: one valid safetensors file, written by the library.

bf16 has no numpy type, so rows travel as raw bytes (uint8) and are never converted.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvkeep_storage.errors import Invalid

CacheDtype = Literal["float32", "bfloat16", "float16"]
RowBytes: TypeAlias = NDArray[np.uint8]
Int32Array: TypeAlias = NDArray[np.int32]

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    Raises: Invalid when any shape, dtype, count or position disagrees.
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


def _described(array: NDArray[np.uint8] | Int32Array) -> str:
    return f"{array.dtype} {array.shape}"
