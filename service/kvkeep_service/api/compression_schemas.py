"""How a context is to be compressed, as it comes in; ``ratio`` is the fraction of KV kept."""

from typing import Annotated, Final, Literal

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from kvkeep_service.api.strict import Strict
from kvkeep_service.bounds import Bounds
from kvkeep_service.budget import DEFAULT_RATIO, HEAD_RATIO, check_ratio
from kvkeep_service.errors import InvalidRequest
from kvkeep_service.ports import NEIGHBOURS_MAX, CompressionSpec, PolicyName, Quantization

DEFAULT_MAX_LOSS: Final = 0.05
"""About what the default ratio loses of prose: nats per token."""


def _number_or_auto(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Say in one sentence what a union would say once for each of its members."""
    try:
        return check(value)
    except ValidationError as error:
        raise PydanticCustomError("ratio", 'needs a finite number or "auto"') from error


class Compression(Strict):
    """How the KV cache of the document is compressed."""

    policy: PolicyName = "kvzip"
    """What picks what stays, as docs/policies.md says; with "none" all stays."""
    ratio: Annotated[float | Literal["auto"] | None, WrapValidator(_number_or_auto)] = None
    """Fraction kept, 0.05 to 1; below 0.15 only with allow_lossy. null: 0.3; 0.6 for kvzip_head."""
    allow_lossy: bool = False
    """Whether a ratio below 0.15, at which answers suffer, is meant."""
    tokens: Annotated[int, Bounds(1, 2**31 - 1)] | None = None
    """Tokens kept per head on average instead of ratio, 1 or more; all when it has no more."""
    neighbours: Annotated[int, Bounds(0, NEIGHBOURS_MAX)] = 0
    """Chunks (0 to 4) that local scoring sees on each side of the one it scores, at their cost."""
    max_loss: Annotated[float, Bounds(0)] | None = None
    """With ratio "auto", the most that may be lost, in nats per token. null: 0.05."""
    scoring: Literal["auto", "exact", "local"] = "auto"
    """Scoring "exact" is KVzip as published, "local" its linear-time variant; "auto" is local."""
    normalization: Literal["none", "kvzip_plus"] = "none"
    """With "kvzip_plus" attention is weighed by what values add to the hidden state."""
    remainder: bool = True
    """Whether eight rows of each head stand for those that kvzip evicts; false: as published."""
    quantization: Quantization = "none"
    """Numbers are kept as they are, or in 8 ("int8", "fp8") or 4 bits with a scale for each row."""

    def spec(self) -> CompressionSpec:
        """Resolve defaults. Raises: InvalidRequest, for values that do not go together."""
        if self.policy != "kvzip":
            self._check_not_scored_by_repeating(self.policy)
        if self.neighbours and self.scoring == "exact":
            raise InvalidRequest(
                "compression.neighbours", 'scoring "exact" sees every chunk: leave it out'
            )
        return CompressionSpec(
            policy=self.policy,
            ratio=self._ratio(),
            scoring="exact" if self.scoring == "exact" else "local",
            quantization=self.quantization,
            normalization=self.normalization,
            neighbours=self.neighbours,
            remainder=self.remainder,
            tokens=self.tokens,
            allow_lossy=self.allow_lossy,
            max_loss=self._max_loss(),
        )

    def _check_not_scored_by_repeating(self, policy: PolicyName) -> None:
        reason = "scores nothing" if policy == "none" else "does not score by repeating"
        for field, value, usual in (
            ("scoring", self.scoring, "auto"),
            ("normalization", self.normalization, "none"),
            ("neighbours", self.neighbours, 0),
            ("remainder", self.remainder, True),
        ):
            if value != usual:
                raise InvalidRequest(
                    f"compression.{field}", f'policy "{policy}" {reason}: leave it out'
                )

    def _max_loss(self) -> float | None:
        """The loss that is to find the ratio; None where a ratio or tokens were asked for."""
        if self.ratio == "auto":
            return DEFAULT_MAX_LOSS if self.max_loss is None else self.max_loss
        if self.max_loss is not None:
            raise InvalidRequest("compression.max_loss", 'goes with ratio "auto" only')
        return None

    def _ratio(self) -> float:
        """The ratio asked for; of no meaning where tokens were."""
        if self.policy == "none":
            if self.ratio not in (None, 1.0):
                raise InvalidRequest("compression.ratio", 'policy "none" keeps everything: 1.0')
            if self.tokens is not None:
                raise InvalidRequest("compression.tokens", 'policy "none" keeps everything')
            return 1.0
        if self.tokens is not None and self.ratio is not None:
            raise InvalidRequest("compression.tokens", "send either tokens or ratio")
        if self.ratio == "auto":
            return 1.0
        usual = HEAD_RATIO if self.policy == "kvzip_head" else DEFAULT_RATIO
        ratio = usual if self.ratio is None else self.ratio
        check_ratio("compression.ratio", ratio, allow_lossy=self.allow_lossy)
        return ratio
