"""Between the engine's tensors and the store's bytes: the same rows, bit for bit, both ways."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvkeep_kernels.layout import ContextRows, Placement, QuantizedKV, RaggedKV
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_storage.arrival import ArrivingRows
from kvkeep_storage.artifact import (
    CacheDtype,
    CacheRows,
    Float16Array,
    LayerRows,
    LayerScales,
    Quantization,
)

_DTYPES: dict[torch.dtype, CacheDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


def to_store(built: BuiltCache) -> CacheRows:
    """Rows of a finished build as the store takes them; on a CPU the buffers are shared."""
    context, selection = built.context, built.selection
    remainders = context.remainders or (None,) * len(context.layers)
    first = context.layers[0]
    counts = selection.counts.numpy()
    # What a layer with a window sees is never evicted either.
    slides = np.array([[layer.placement is not None] for layer in context.layers])
    protected = np.where(slides, counts[0], np.int32(selection.num_protected))
    return CacheRows(
        dtype=_DTYPES[first.dtype],
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        ratios=selection.ratios,
        counts=counts,
        protected=protected,
        layers=tuple(
            LayerRows(
                _bytes_of(layer.k),
                _bytes_of(layer.v),
                _int32(positions),
                _scales(layer),
                None if remainder is None else _bytes_of(remainder.flatten(3)),
            )
            for layer, positions, remainder in zip(
                context.layers, selection.positions, remainders, strict=True
            )
        ),
        quantization=_quantization(first),
    )


def to_engine(
    rows: CacheRows | ArrivingRows,
    num_tokens: int,
    device: torch.device,
    windows: Sequence[int | None] = (),
) -> ResidentContext:
    """A cache as the engine reads it; on a CPU the buffers are shared, else copied.

    ``windows``: the model's, as in its ``ModelShape``. Of rows that are still arriving nothing is
    looked at but their shapes.
    """
    layers: list[ContextRows] = []
    for index, layer in enumerate(rows.layers):
        length = torch.from_numpy(rows.counts[:, index].sum(axis=0, dtype=np.int32))
        start = (torch.cumsum(length, dim=0) - length).to(device=device, dtype=torch.int32)
        k, v = (torch.from_numpy(part) for part in (layer.k, layer.v))
        placement = None
        if windows and windows[index] is not None:
            positions = torch.from_numpy(layer.position).to(device)
            placement = Placement(positions, num_tokens)
        if layer.scales is None:
            dtype = _TORCH[rows.dtype]
            k, v = k.view(dtype).to(device), v.view(dtype).to(device)
            layers.append(RaggedKV(k, v, start, length.to(device), placement))
            continue
        assert rows.quantization != "none"
        scales = layer.scales
        layers.append(
            QuantizedKV(
                kind=rows.quantization,
                k=k.to(device),
                v=v.to(device),
                k_scale=torch.from_numpy(scales.k_scale).to(device),
                k_zero=_given(scales.k_zero, device),
                v_scale=torch.from_numpy(scales.v_scale).to(device),
                v_zero=_given(scales.v_zero, device),
                k_mean=_given(scales.k_mean, device),
                start=start,
                length=length.to(device),
                dtype=_TORCH[rows.dtype],
                placement=placement,
            )
        )
    return ResidentContext(
        tuple(layers),
        torch.from_numpy(rows.counts),
        rows.ratios,
        num_tokens,
        remainders=_remainders(rows, device),
    )


def _remainders(rows: CacheRows | ArrivingRows, device: torch.device) -> tuple[Tensor, ...] | None:
    """Per layer [bands, 2, heads, rows, head_dim]; None where a cache has none."""
    found = []
    for layer in rows.layers:
        if layer.remainder is None:
            return None
        numbers = torch.from_numpy(layer.remainder).view(_TORCH[rows.dtype])
        found.append(numbers.unflatten(3, (-1, rows.head_dim)).to(device))
    return tuple(found)


def _quantization(layer: ContextRows) -> Quantization:
    return "none" if isinstance(layer, RaggedKV) else layer.kind


def _given(part: Float16Array | None, device: torch.device) -> Tensor | None:
    return None if part is None else torch.from_numpy(part).to(device)


def _scales(layer: ContextRows) -> LayerScales | None:
    if isinstance(layer, RaggedKV):
        return None
    return LayerScales(
        k_scale=_half(layer.k_scale),
        k_zero=None if layer.k_zero is None else _half(layer.k_zero),
        v_scale=_half(layer.v_scale),
        v_zero=None if layer.v_zero is None else _half(layer.v_zero),
        k_mean=None if layer.k_mean is None else _half(layer.k_mean),
    )


def _half(part: Tensor) -> Float16Array:
    return part.cpu().contiguous().numpy()


def _int32(positions: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    return positions.cpu().numpy().astype(np.int32)


def _bytes_of(rows: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return rows.cpu().contiguous().view(torch.uint8).numpy()
