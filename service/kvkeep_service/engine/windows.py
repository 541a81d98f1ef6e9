"""What layers with a sliding window keep of a document: what they see of it, and nothing less."""

from dataclasses import replace

import torch

from kvkeep_kernels.compaction import Selection
from kvkeep_service.engine.architecture import ModelShape


def with_windows(selection: Selection, shape: ModelShape, num_tokens: int) -> Selection:
    """A selection over the layers that evict, with the rows of all others put in between.

    Those are the last W - 1 tokens of every head, in position order, in band 0: outside the
    ratio and never evicted. Shapes: selection's counts [bands, evicting layers, heads]; the
    result's [bands, layers, heads]. Modifies: nothing.
    """
    if not shape.windows:
        return selection
    bands, _, heads = selection.counts.shape
    counts = torch.zeros(bands, shape.num_layers, heads, dtype=torch.int32)
    counts[:, list(shape.evicting)] = selection.counts
    evicting = iter(selection.positions)
    positions = []
    for layer, window in enumerate(shape.windows):
        if window is None:
            positions.append(next(evicting))
            continue
        first = max(0, num_tokens - (window - 1))
        counts[0, layer] = num_tokens - first
        positions.append(torch.arange(first, num_tokens).repeat(heads))
    return replace(selection, positions=tuple(positions), counts=counts)
