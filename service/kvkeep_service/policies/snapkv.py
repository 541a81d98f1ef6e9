"""SnapKV without a question: the document's own last tokens vote for what came before them.

Source: arXiv 2404.14469, section 4 (observation window, voting, clustering by pooling), with the
window of 32 and the maximum over 7 that it reports for LongBench. A KV head's vote is the mean
of its query heads', since here rows are evicted before grouped queries share them (as kvpress
does). The published method lets the question vote; nobody has asked one yet when a document is
registered, and that is what it loses here.
"""

from collections.abc import Generator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvkeep_kernels.scoring import row_lse
from kvkeep_service.engine.build import Parameters
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens

WINDOW_TOKENS = 32
POOLED_TOKENS = 7


class LastQueries:
    """The last queries of every layer that evicts, [num_q_heads, at most the window, head_dim]."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.queries: dict[int, Tensor] = {}
        self.scales: dict[int, float] = {}

    def see_queries(self, layer: int, first: int, q: Tensor, scale: float) -> None:
        """As ``PrefillWatcher.see_queries``."""
        del first
        seen = torch.cat([self.queries.get(layer, q[:, :0]), q[:, -WINDOW_TOKENS:]], dim=1)
        # A copy, or a view would keep the whole slice alive.
        self.queries[layer] = seen[:, -WINDOW_TOKENS:].clone()
        self.scales[layer] = scale


class SnapKV:
    """The policy: no forward of its own, since the prefill shows it its last queries."""

    name = "snapkv"
    version = 1
    repeats = False
    sample = None
    parameters: ClassVar[Parameters] = {"window": WINDOW_TOKENS, "pooled": POOLED_TOKENS}

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.watcher = LastQueries()

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """As ``ScoringPolicy.score``; one work item per layer.

        The window itself is kept first, newest first: its rows score in (1, 2], others at most 1.
        """
        layers, total = model.shape.evicting, len(document.ids)
        scores = torch.zeros(len(layers), model.shape.num_kv_heads, total, device=model.device)
        window = min(WINDOW_TOKENS, total)
        scores[:, :, -window:] = 1 + torch.arange(1, window + 1, device=model.device) / window
        for index, layer in enumerate(layers):
            if window < total:
                scores[index, :, :-window] = self._votes(layer, cache, document)
            yield (index + 1) / len(layers)
        return scores

    def _votes(self, layer: int, cache: FullCache, document: DocumentTokens) -> Tensor:
        """What the window's queries pay to each earlier row of the document, pooled."""
        queries, scale = self.watcher.queries[layer], self.watcher.scales[layer]
        num_prefix, first = document.num_prefix, document.num_tokens - WINDOW_TOKENS
        prefix = cache.rows(layer, 0, num_prefix).k
        voted_on = cache.rows(layer, num_prefix, first).k
        own = cache.rows(layer, first, document.num_tokens).k
        lse = row_lse(queries, prefix, voted_on, own, scale=scale)
        keys = cache.rows(layer, 0, first).k
        votes = torch.empty(voted_on.shape[:2], device=keys.device)
        for head, (mine, norms) in enumerate(
            zip(queries.chunk(len(keys)), lse.chunk(len(keys)), strict=True)
        ):
            # One head at a time: a matrix of all would outgrow the cache.
            logits = scale * (mine.float() @ keys[head].float().T)
            received = torch.exp(logits - norms[..., None]).mean(dim=1)
            # Pooled before the prefix is left out, as its neighbours count.
            pooled = max_pool1d(received, POOLED_TOKENS, stride=1, padding=POOLED_TOKENS // 2)
            votes[head] = pooled.mean(dim=0)[num_prefix:]
        return votes
