"""Between the engine's tensors and the store's bytes: the same rows, bit for bit, both ways."""

import numpy as np
import torch
from torch import Tensor

from kvkeep_kernels.layout import RaggedKV
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_storage.arrival import ArrivingRows
from kvkeep_storage.artifact import CacheDtype, CacheRows, LayerRows

_DTYPES: dict[torch.dtype, CacheDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


def to_store(built: BuiltCache) -> CacheRows:
    """Rows of a finished build as the store takes them; on a CPU the buffers are shared."""
    context, selection = built.context, built.selection
    first = context.layers[0]
    counts = selection.counts.numpy()
    protected = np.full(counts.shape[1:], selection.num_protected, dtype=np.int32)
    return CacheRows(
        dtype=_DTYPES[first.k.dtype],
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        ratios=selection.ratios,
        counts=counts,
        protected=protected,
        layers=tuple(
            LayerRows(_bytes_of(layer.k), _bytes_of(layer.v), _int32(positions))
            for layer, positions in zip(context.layers, selection.positions, strict=True)
        ),
    )


def to_engine(
    rows: CacheRows | ArrivingRows, num_tokens: int, device: torch.device
) -> ResidentContext:
    """A cache as the engine reads it; on a CPU the buffers are shared, else copied.

    Of rows that are still arriving nothing is looked at but their shapes.
    """
    dtype = _TORCH[rows.dtype]
    layers = []
    for index, layer in enumerate(rows.layers):
        length = torch.from_numpy(rows.counts[:, index].sum(axis=0, dtype=np.int32))
        layers.append(
            RaggedKV(
                torch.from_numpy(layer.k).view(dtype).to(device),
                torch.from_numpy(layer.v).view(dtype).to(device),
                (torch.cumsum(length, dim=0) - length).to(device=device, dtype=torch.int32),
                length.to(device),
            )
        )
    return ResidentContext(tuple(layers), torch.from_numpy(rows.counts), rows.ratios, num_tokens)


def _int32(positions: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    return positions.cpu().numpy().astype(np.int32)


def _bytes_of(rows: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return rows.cpu().contiguous().view(torch.uint8).numpy()
