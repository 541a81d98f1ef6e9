"""Expected attention: how much future questions will attend to a row, were queries Gaussian.

The queries of the document, before rope, are taken for a sample of those to come: mean u and
covariance S per query head. With R the rope matrix averaged over the positions that follow, a
future query is N(Ru, RSR') and the expectation of its unnormalised attention has a closed form:

    z[i] = scale * (Ru)'k[i] + scale^2 / 2 * k[i]'(RSR')k[i]        score[i] = softmax(z)[i] |v[i]|

Source: arXiv 2510.00636, section 3, with the settings of kvpress: 512 future positions, the first
four tokens left out as outliers, the mean over the query heads of a KV head. Queries are seen
rotated, by the prefill itself, and turned back: so models that normalise them are covered too.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep_service.engine.build import Parameters
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.engine.rotation import Rotation

FUTURE_POSITIONS = 512
NUM_SINKS = 4


@dataclass(slots=True)
class _Moments:
    """Count, mean [num_q_heads, d] and summed squares about it [num_q_heads, d, d], fp32."""

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, sample: Tensor) -> "_Moments":
        mean = sample.mean(dim=1)
        apart = sample - mean[:, None]
        return cls(sample.shape[1], mean, apart.transpose(1, 2) @ apart)

    def add(self, other: "_Moments") -> None:
        """Merge two samples. By their means, since squares about zero would cancel in fp32.

        Source: Chan, Golub, LeVeque 1983, pairwise update.
        """
        total = self.count + other.count
        apart = other.mean - self.mean
        self.mean += apart * (other.count / total)
        weight = self.count * other.count / total
        self.squares += other.squares + weight * apart[:, :, None] * apart[:, None, :]
        self.count = total


class QueryMoments:
    """Mean and covariance of every layer's queries before rope, gathered slice by slice."""

    def __init__(self, model: LanguageModel) -> None:
        """Start with nothing seen."""
        self._model = model
        self._layers: dict[int, _Moments] = {}
        self._scales: dict[int, float] = {}

    def see_queries(self, layer: int, first: int, q: Tensor, scale: float) -> None:
        """As ``PrefillWatcher.see_queries``."""
        skipped = max(0, NUM_SINKS - first)
        seen = q[:, skipped:].float()
        if seen.shape[1] == 0:
            return
        self._scales[layer] = scale
        begin = first + skipped
        rotation = self._model.rotation(layer, begin, begin + seen.shape[1])
        found = _Moments.of(rotation.undo(seen))
        if layer in self._layers:
            self._layers[layer].add(found)
        else:
            self._layers[layer] = found

    def expected_logits(self, layer: int, k: Tensor, future: Rotation) -> Tensor:
        """The log of what future queries are expected to weigh each key, up to a constant.

        Shapes: k [num_kv_heads, tokens, head_dim]. Returns [num_q_heads, tokens] fp32.
        """
        seen, scale = self._layers[layer], self._scales[layer]
        turn = future.mean_matrix(k.shape[2])
        mean = seen.mean @ turn
        covariance = turn.T @ (seen.squares / seen.count) @ turn
        group_size = len(mean) // len(k)
        logits = torch.empty(len(mean), k.shape[1], device=k.device)
        for head in range(len(mean)):
            keys = k[head // group_size].float()
            spread = ((keys @ covariance[head]) * keys).sum(dim=1)
            logits[head] = scale * (keys @ mean[head]) + 0.5 * scale**2 * spread
        return logits


class ExpectedAttention:
    """The policy: no forward of its own, since the prefill shows it its queries."""

    name = "expected_attention"
    version = 1
    repeats = False
    sample = None
    parameters: ClassVar[Parameters] = {
        "future_positions": FUTURE_POSITIONS,
        "sinks": NUM_SINKS,
    }

    def __init__(self, model: LanguageModel) -> None:
        """Take the model whose prefill it will watch."""
        self.watcher = QueryMoments(model)

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """As ``ScoringPolicy.score``; one work item per layer."""
        layers, total = model.shape.evicting, document.num_tokens
        num_kv_heads = model.shape.num_kv_heads
        scores = torch.empty(len(layers), num_kv_heads, total, device=model.device)
        for index, layer in enumerate(layers):
            rows = cache.rows(layer, NUM_SINKS, total)
            future = model.rotation(layer, total, total + FUTURE_POSITIONS)
            logits = self.watcher.expected_logits(layer, rows.k, future)
            weights = torch.softmax(logits, dim=-1).unflatten(0, (num_kv_heads, -1))
            norms = torch.linalg.vector_norm(rows.v, dim=-1, dtype=torch.float32)
            scores[index, :, NUM_SINKS:] = weights.mean(dim=1) * norms
            yield (index + 1) / len(layers)
        # As in kvpress, where a document has them: a short prefix leaves sinks to it.
        scores[:, :, :NUM_SINKS] = scores[:, :, NUM_SINKS:].amax()
        return scores[:, :, document.num_prefix :]
