"""Which policy decides what stays: from what was asked for to the object that scores.

All policies answer to ``engine.build.ScoringPolicy``; selection, artifact and decoding are the
same for every one of them.
"""

from dataclasses import dataclass

from kvkeep_service.engine.build import ScoringPolicy
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.errors import HeadScoresMissing
from kvkeep_service.policies.expected_attention import ExpectedAttention
from kvkeep_service.policies.head_scores import HeadScores
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts, chunk_tokens
from kvkeep_service.policies.kvzip_head import KVzipHead
from kvkeep_service.policies.random import Random
from kvkeep_service.policies.snapkv import SnapKV
from kvkeep_service.policies.streaming import Streaming
from kvkeep_service.ports import CompressionSpec

MIN_DOCUMENT_TOKENS = 256
"""Below this nothing is evicted: tiny contexts have nothing to spare."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """What policies need to know of the served model. ``head_scores``: of ``calibrate``, if any."""

    model: LanguageModel
    prompts: RepeatPrompts
    head_scores: HeadScores | None

    def choose(
        self, compression: CompressionSpec, document: DocumentTokens
    ) -> ScoringPolicy | None:
        """The policy of one build; None keeps every row, where nothing may or can be evicted.

        Raises: HeadScoresMissing, for whole heads of a model that has not been calibrated.
        """
        is_long = len(document.ids) >= MIN_DOCUMENT_TOKENS
        policy = self._named(compression, document.num_tokens)
        return policy if is_long and not bool(document.protected.all()) else None

    def _named(self, compression: CompressionSpec, num_tokens: int) -> ScoringPolicy | None:
        match compression.policy:
            case "kvzip":
                return self._kvzip(compression, num_tokens)
            case "kvzip_head":
                if self.head_scores is None:
                    raise HeadScoresMissing
                return KVzipHead(self.head_scores)
            case "snapkv":
                return SnapKV()
            case "expected_attention":
                return ExpectedAttention(self.model)
            case "streaming":
                return Streaming()
            case "random":
                return Random()
            case "none":
                return None

    def _kvzip(self, compression: CompressionSpec, num_tokens: int) -> KVzip:
        chunk = chunk_tokens(compression.scoring, num_tokens, self.model.shape.max_positions)
        return KVzip(
            self.prompts,
            scoring=compression.scoring,
            chunk_tokens=chunk,
            neighbours=compression.neighbours,
            normalization=compression.normalization,
            remainder=compression.remainder and not self.model.shape.windows,
        )
