"""KVzip by whole heads: a head keeps the document, or nothing of it but the prefix.

Source: arXiv 2505.23416, section 4.2 (context-independent eviction) and its code: scores of a
head, measured once per model, stand for those of all its rows; the prompt before the document
stays in every head, and nothing else does, neither sinks nor a recent window of it. Here every
head keeps one row of the document besides, as under any policy, and the head at the margin its
first rows: an exact count is kept.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from kvkeep_service.engine.build import Parameters
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.policies.head_scores import HeadScores


class KVzipHead:
    """The policy: no pass over the document, since the model was calibrated."""

    name = "kvzip_head"
    version = 1
    repeats = False
    watcher = None
    sample = None

    def __init__(self, head_scores: HeadScores) -> None:
        """Take the scores of the model that will build."""
        self._head_scores = head_scores

    @property
    def parameters(self) -> Parameters:
        """As ``ScoringPolicy.parameters``: heads of another file are others."""
        return {"head_scores": self._head_scores.digest}

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """As ``ScoringPolicy.score``; the rows of a head are equal, so the earlier come first."""
        del cache
        heads = torch.tensor(self._head_scores.scores, dtype=torch.float32, device=model.device)
        yield 1.0
        return heads[:, :, None].expand(-1, -1, len(document.ids))
