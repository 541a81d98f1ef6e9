"""Measuring what a model's heads are worth, on texts like those it will be asked about.

Source: arXiv 2505.23416: the head score is the maximum of KVzip's scores over the positions of a
text; its authors take one book of 88 thousand tokens. Several texts count as one.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from kvkeep_service.engine.build import ScoringPolicy
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel, LoadedModel
from kvkeep_service.engine.prefill import DocumentTokens, prefill
from kvkeep_service.errors import InvalidRequest
from kvkeep_service.plan import Planner
from kvkeep_service.policies.choose import MIN_DOCUMENT_TOKENS
from kvkeep_service.policies.head_scores import encode_head_scores
from kvkeep_service.ports import CompressionSpec, DocumentSpec

_TENANT = "calibrate"


def calibrate(loaded: LoadedModel, texts: Sequence[str], report: Callable[[float], None]) -> bytes:
    """Score every text exactly, and return the file of the heads' highest scores.

    ``report`` is told the fraction done. Raises: InvalidRequest, for a text too short to score;
        DocumentTooLong.
    """
    planner, model = Planner(loaded), loaded.language_model
    size = (len(model.shape.evicting), model.shape.num_kv_heads)
    best = torch.zeros(size, device=model.device)
    tokens = 0
    for index, text in enumerate(texts):
        plan = planner.plan(_TENANT, DocumentSpec(text), CompressionSpec(scoring="exact"))
        if plan.policy is None:
            raise InvalidRequest(f"text {index + 1}", f"has below {MIN_DOCUMENT_TOKENS} tokens")
        steps = _scores(model, plan.document, plan.policy)
        while True:
            try:
                report((index + next(steps)) / len(texts))
            except StopIteration as finished:
                best = torch.maximum(best, finished.value.amax(dim=2))
                break
        tokens += len(plan.document.ids)
    scores = tuple(tuple(layer) for layer in best.tolist())
    return encode_head_scores(scores, weights_digest=loaded.info.weights_digest, tokens=tokens)


def _scores(
    model: LanguageModel, document: DocumentTokens, policy: ScoringPolicy
) -> Generator[float, None, Tensor]:
    cache = FullCache(model.shape, document.num_tokens, dtype=model.dtype, device=model.device)
    for fraction in prefill(model, cache, document, policy.watcher):
        yield fraction / 2
    steps = policy.score(model, cache, document)
    while True:
        try:
            yield 0.5 + next(steps) / 2
        except StopIteration as finished:
            scores: Tensor = finished.value
            return scores
