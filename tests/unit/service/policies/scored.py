"""Running a policy as a build does, and the policies that tests run over."""

from collections.abc import Callable

from torch import Tensor

from kvkeep_service.engine.build import ScoringPolicy
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens, prefill
from kvkeep_service.policies.expected_attention import ExpectedAttention
from kvkeep_service.policies.head_scores import HeadScores
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts
from kvkeep_service.policies.kvzip_head import KVzipHead
from kvkeep_service.policies.random import Random
from kvkeep_service.policies.snapkv import SnapKV
from kvkeep_service.policies.streaming import Streaming

PROMPTS = RepeatPrompts(first=(1, 2, 3), later=(4, 5), turn_end=(6, 7))
HEADS = ((0.5, 0.25), (0.125, 0.75), (0.625, 0.375))

Make = Callable[[LanguageModel], ScoringPolicy]
POLICIES: dict[str, Make] = {
    "kvzip": lambda _: KVzip(PROMPTS, scoring="local", chunk_tokens=100),
    "kvzip_head": lambda model: KVzipHead(
        HeadScores(HEADS[: len(model.shape.evicting)], "of-a-test")
    ),
    "snapkv": lambda _: SnapKV(),
    "expected_attention": ExpectedAttention,
    "streaming": lambda _: Streaming(),
    "random": lambda _: Random(),
}


def scored(model: LanguageModel, document: DocumentTokens, policy: ScoringPolicy) -> Tensor:
    """The scores that a build would select by."""
    cache = FullCache(model.shape, document.num_tokens, dtype=model.dtype, device=model.device)
    for _ in prefill(model, cache, document, policy.watcher):
        pass
    steps = policy.score(model, cache, document)
    fractions = []
    while True:
        try:
            fractions.append(next(steps))
        except StopIteration as finished:
            assert fractions == sorted(fractions)
            assert fractions[-1] == 1.0
            scores: Tensor = finished.value
            return scores
