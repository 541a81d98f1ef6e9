"""Where the tensors of a slab lie in its file, as a verified header says."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvkeep_storage.artifact import (
    ITEM_BYTES,
    SCALE_NAMES,
    CacheDtype,
    Int32Array,
    Quantization,
    row_bytes,
)
from kvkeep_storage.errors import Corrupt
from kvkeep_storage.slab import SlabDigests, digest_of, tensor_names

_DTYPE_NAMES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPE_BYTES: dict[str, int] = {"I32": 4, "U8": 1} | {
    name: ITEM_BYTES[dtype] for dtype, name in _DTYPE_NAMES.items()
}


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """First byte of each tensor in the file: ``starts[layer]`` in the order of ``tensor_names``."""

    starts: tuple[tuple[int, ...], ...]


def read_layout(
    header: memoryview,
    digests: SlabDigests,
    counts: Int32Array,
    dtype: CacheDtype,
    head_dim: int,
    *,
    quantization: Quantization = "none",
    band: int = 0,
    remainder_rows: int = 0,
) -> SlabLayout:
    """Verify a slab's header and find its tensors, which leave no byte of the file out.

    Shapes: header is the first ``digests.header_bytes`` of the file; counts int32
    [layers, heads], the rows of this band by the manifest.
    Raises: Corrupt.
    """
    found = digest_of([header])
    if found != digests.header_digest:
        raise Corrupt("header", f"its digest is {found}, not {digests.header_digest}")
    tensors = _parse(header[8:])
    heads = counts.shape[1]
    starts = []
    spans = []
    for layer, rows in enumerate(counts.sum(axis=1).tolist()):
        names = tensor_names(layer, quantization, band, has_remainder=remainder_rows > 0)
        shapes: list[tuple[str, tuple[int, ...]]] = [("I32", (heads,)), ("I32", (rows,))]
        if quantization == "none":
            shapes += [(_DTYPE_NAMES[dtype], (rows, head_dim))] * 2
        else:
            shapes += [("U8", (rows, row_bytes(dtype, quantization, head_dim)))] * 2
            shapes += [("F16", (rows,))] * len(SCALE_NAMES[quantization])
        if quantization == "int4" and band == 0:
            shapes.append(("F16", (heads, head_dim)))
        if remainder_rows:
            shapes += [(_DTYPE_NAMES[dtype], (heads, remainder_rows * head_dim))] * 2
        found_here = [
            _span(tensors, name, *shape) for name, shape in zip(names, shapes, strict=True)
        ]
        spans += found_here
        starts.append(tuple(digests.header_bytes + start for start, _ in found_here))
    _check_tiling(spans, digests.size_bytes - digests.header_bytes)
    return SlabLayout(tuple(starts))


class _TensorEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dtype: str
    shape: Annotated[list[int], Field(max_length=2)]
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]


class _Header(BaseModel):
    # With the tensors as its extra fields it is read in two thirds of a union's time.
    model_config = ConfigDict(extra="allow", strict=True)

    __pydantic_extra__: dict[str, _TensorEntry]
    metadata: Annotated[dict[str, str], Field(alias="__metadata__")]


def _parse(text: memoryview) -> dict[str, _TensorEntry]:
    try:
        return _Header.model_validate_json(text.tobytes()).__pydantic_extra__
    except ValidationError as error:
        raise Corrupt("header", "not one that safetensors writes") from error


def _span(
    tensors: dict[str, _TensorEntry], name: str, dtype: str, shape: tuple[int, ...]
) -> tuple[int, int]:
    """First and last byte behind the header of a tensor that is as expected."""
    entry = tensors.get(name)
    if entry is None or entry.dtype != dtype or tuple(entry.shape) != shape:
        raise Corrupt(name, f"{dtype} {shape} expected, the header says {entry}")
    start, end = entry.data_offsets
    if end - start != math.prod(shape) * _DTYPE_BYTES[dtype]:
        raise Corrupt(name, f"bytes {start} to {end} are not {dtype} {shape}")
    return start, end


def _check_tiling(spans: list[tuple[int, int]], data_bytes: int) -> None:
    """Raises: Corrupt unless the tensors follow each other without a gap, to the very end."""
    done = 0
    for start, end in sorted(spans):
        if start != done:
            raise Corrupt("header", f"a tensor begins at byte {start}, not at {done}")
        done = end
    if done != data_bytes:
        raise Corrupt("header", f"tensors end at byte {done} of {data_bytes}")
