"""What stands for the rows that a build evicts: see ``kernels/remainder.py``.

The queries it is fitted to are those of the policy's own pass over the document, most of them
from the prompt that asks for a repetition: a prompt looks at a document as a question does, while
its repetition looks at single rows, one after the other.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from kvkeep_kernels.compaction import Selection
from kvkeep_kernels.remainder import Clusters, cluster_rows, fit_remainders
from kvkeep_service.engine.cache import FullCache

REMAINDER_VERSION = 6
"""Goes up with every change after which the same document may get other remainders."""
SAMPLES_MAX = 64
"""Queries of a head that are kept, however long the document is."""
ROWS_PER_SAMPLE = 34
"""Of the repeated text, one row in so many is sampled; of the prompt, every one."""

Remainders = tuple[Tensor, ...]
"""Per layer [bands, 2, num_kv_heads, rows, head_dim], K then V."""


class QuerySample:
    """Queries of each layer, taken while a policy repeats the document."""

    def __init__(self, num_chunks: int, num_layers: int) -> None:
        """``num_chunks``: how many repeat inputs there will be, which share ``SAMPLES_MAX``."""
        self._quota = max(1, SAMPLES_MAX // num_chunks)
        self._stride = -(-num_chunks // SAMPLES_MAX)
        self._ends = [0] * num_layers
        self._scales: dict[int, float] = {}
        self._rows: Tensor | None = None

    def rows_of(self, number: int, num_prompt: int, num_rows: int) -> list[int]:
        """Which rows of repeat input ``number`` to take, ascending; ``num_prompt`` come first."""
        if number % self._stride:
            return []
        prompt = list(range(num_prompt))
        text = list(range(num_prompt, num_rows, ROWS_PER_SAMPLE))
        wanted = [*prompt, *text]
        step = max(1.0, len(wanted) / self._quota)
        return [wanted[int(place * step)] for place in range(int(len(wanted) / step))]

    def take(self, layer: int, q: Tensor, rows: Sequence[int], scale: float) -> None:
        """Keep some rows of one layer's queries [num_q_heads, rows, head_dim]."""
        if self._rows is None:
            # All in one: many small ones between large temporary ones would keep the heap from
            # using the place of those again.
            heads, _, width = q.shape
            self._rows = q.new_empty(len(self._ends), heads, SAMPLES_MAX, width)
        first = self._ends[layer]
        last = self._ends[layer] = first + len(rows)
        self._rows[layer, :, first:last] = q[:, rows]
        self._scales[layer] = scale

    def of(self, layer: int) -> tuple[Tensor, float]:
        """All queries of a layer [num_q_heads, samples, head_dim], and what multiplies logits."""
        assert self._rows is not None, "a policy has scored"
        return self._rows[layer, :, : self._ends[layer]], self._scales[layer]


def cluster(
    cache: FullCache, sample: QuerySample, num_layers: int, num_tokens: int
) -> Generator[None, None, Clusters]:
    """Which rows of each layer are alike; yields after each layer.

    Returns both of ``Clusters`` as [layers, num_kv_heads, tokens].
    """
    found = []
    for layer in range(num_layers):
        q, scale = sample.of(layer)
        found.append(cluster_rows(q, cache.rows(layer, 0, num_tokens), scale=scale))
        yield
    of, loss = zip(*found, strict=True)
    return Clusters(torch.stack(of), torch.stack(loss))


def fit(
    cache: FullCache, selection: Selection, sample: QuerySample, clusters: Tensor, num_tokens: int
) -> Generator[None, None, Remainders]:
    """Remainders of every layer for each band of a selection; yields after each layer.

    ``clusters`` is ``of`` as ``cluster`` returns it. Of a model without windows: a tail has the
    same rows in front in every layer.
    """
    found: Tensor | None = None
    for layer, positions in enumerate(selection.positions):
        q, scale = sample.of(layer)
        counts = selection.counts[:, layer].tolist()
        rows = cache.rows(layer, 0, num_tokens)
        own = fit_remainders(q, rows, clusters[layer], positions, counts, scale=scale)
        if found is None:
            found = own.new_empty(len(selection.positions), *own.shape)
        found[layer] = own
        yield
    assert found is not None, "a model has layers"
    return found.unbind()
