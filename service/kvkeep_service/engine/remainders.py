"""What stands for the rows that a build evicts: see ``kernels/remainder.py``.

The queries it is fitted to are those of the policy's own pass over the document, most of them
from the prompt that asks for a repetition: a prompt looks at a document as a question does, while
its repetition looks at single rows, one after the other.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from kvkeep_kernels.compaction import Selection
from kvkeep_kernels.remainder import fit_remainders
from kvkeep_service.engine.cache import FullCache

REMAINDER_VERSION = 1
"""Goes up with every change after which the same document may get other remainders."""
SAMPLES_MAX = 64
"""Queries of a head that are kept, however long the document is."""
ROWS_PER_SAMPLE = 34
"""Of the repeated text, one row in so many is sampled; of the prompt, every one."""

Remainders = tuple[Tensor, ...]
"""Per layer [bands, 2, num_kv_heads, rows, head_dim], K then V."""


class QuerySample:
    """Queries of each layer, taken while a policy repeats the document."""

    def __init__(self, num_chunks: int) -> None:
        """``num_chunks``: how many repeat inputs there will be, which share ``SAMPLES_MAX``."""
        self._quota = max(1, SAMPLES_MAX // num_chunks)
        self._stride = -(-num_chunks // SAMPLES_MAX)
        self._taken: dict[int, list[Tensor]] = {}
        self._scales: dict[int, float] = {}

    def rows_of(self, number: int, num_prompt: int, num_rows: int) -> list[int]:
        """Which rows of repeat input ``number`` to take, ascending; ``num_prompt`` come first."""
        if number % self._stride:
            return []
        prompt = list(range(num_prompt))
        text = list(range(num_prompt, num_rows, ROWS_PER_SAMPLE))
        wanted = [*prompt, *text]
        step = max(1.0, len(wanted) / self._quota)
        return [wanted[int(place * step)] for place in range(int(len(wanted) / step))]

    def take(self, layer: int, q: Tensor, scale: float) -> None:
        """Keep queries [num_q_heads, rows, head_dim] of one layer; they are given away."""
        self._taken.setdefault(layer, []).append(q)
        self._scales[layer] = scale

    def of(self, layer: int) -> tuple[Tensor, float]:
        """All queries of a layer [num_q_heads, samples, head_dim], and what multiplies logits."""
        return torch.cat(self._taken[layer], dim=1), self._scales[layer]


def fit(
    cache: FullCache, selection: Selection, sample: QuerySample, num_tokens: int
) -> Generator[None, None, Remainders]:
    """Remainders of every layer for each band of a selection; yields after each layer.

    Of a model without windows: a tail has the same rows in front in every layer.
    """
    found = []
    for layer, positions in enumerate(selection.positions):
        q, scale = sample.of(layer)
        counts = selection.counts[:, layer].tolist()
        rows = cache.rows(layer, 0, num_tokens)
        found.append(fit_remainders(q, rows, positions, counts, scale=scale))
        yield
    return tuple(found)
