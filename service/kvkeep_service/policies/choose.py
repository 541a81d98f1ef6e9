"""Which policy decides what stays: from what was asked for to the object that scores.

All policies answer to ``engine.build.ScoringPolicy``; selection, artifact and decoding are the
same for every one of them.
"""

from dataclasses import dataclass

from kvkeep_service.engine.build import DocumentTokens, ScoringPolicy
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts, chunk_tokens
from kvkeep_service.ports import CompressionSpec

MIN_DOCUMENT_TOKENS = 256
"""Below this nothing is evicted: tiny contexts have nothing to spare."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """What policies need to know of the served model."""

    prompts: RepeatPrompts
    max_positions: int

    def choose(
        self, compression: CompressionSpec, document: DocumentTokens
    ) -> ScoringPolicy | None:
        """The policy of one build; None keeps every row, where nothing may or can be evicted."""
        is_long = len(document.ids) >= MIN_DOCUMENT_TOKENS
        if not is_long or bool(document.protected.all()):
            return None
        match compression.policy:
            case "none":
                return None
            case "kvzip":
                return KVzip(
                    self.prompts,
                    scoring=compression.scoring,
                    chunk_tokens=chunk_tokens(
                        compression.scoring, document.num_tokens, self.max_positions
                    ),
                    normalization=compression.normalization,
                )
            case other:
                raise NotImplementedError(other)
