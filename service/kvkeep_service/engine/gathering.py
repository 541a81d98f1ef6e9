"""Gathering the kept rows of one layer from the full cache, in the form they are stored in."""

from dataclasses import replace

import torch

from kvkeep_kernels.compaction import Selection, compact
from kvkeep_kernels.layout import ContextRows, DenseKV, Placement, RaggedKV
from kvkeep_kernels.quantize import channel_mean, quantize_kv
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.ports import Quantization


def kept_rows(
    cache: FullCache,
    selection: Selection,
    layer: int,
    num_tokens: int,
    quantization: Quantization,
) -> ContextRows:
    """One layer's selected rows, of a document of ``num_tokens``, in buffers of their own.

    Modifies: nothing. Raises: OutOfRange, for rows that cannot be quantised.
    """
    rows = cache.lasting(layer, num_tokens)
    positions = selection.positions[layer]
    lengths = selection.counts[:, layer].sum(dim=0, dtype=torch.int32)
    kept = compact(rows, positions - (num_tokens - rows.tokens), lengths)
    if cache.window(layer) is not None:
        kept = replace(kept, placement=Placement(positions.to(kept.start), num_tokens))
    return _quantized(kept, rows, quantization)


def _quantized(kept: RaggedKV, full: DenseKV, quantization: Quantization) -> ContextRows:
    """Kept rows as they are stored, and read by every question.

    Channel means are those of all rows, not of the kept ones: so what a row becomes does not
    depend on the ratio that others asked for.
    """
    match quantization:
        case "none":
            return kept
        case "int8" | "fp8":
            return quantize_kv(kept, quantization)
        case "int4":
            return quantize_kv(kept, quantization, channel_mean(full.k))
