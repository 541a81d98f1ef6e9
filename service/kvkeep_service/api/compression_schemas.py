"""How a context is to be compressed, as it comes in; ``ratio`` is the fraction of KV kept."""

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from kvkeep_service.api.strict import Strict, only
from kvkeep_service.budget import DEFAULT_RATIO, check_ratio
from kvkeep_service.errors import InvalidRequest
from kvkeep_service.ports import CompressionSpec, Quantization, Scoring


def _no_auto(value: object) -> object:
    if value == "auto":
        raise PydanticCustomError(
            "unsupported", '"auto" is not supported by this version; send a number'
        )
    return value


class Compression(Strict):
    """How the KV cache of the document is compressed."""

    policy: Annotated[
        Literal[
            "kvzip",
            "kvzip_head",
            "kvpop",
            "streaming",
            "snapkv",
            "expected_attention",
            "random",
            "none",
        ],
        only("kvzip", "none"),
    ] = "kvzip"
    """What picks what stays; not supported yet: only "kvzip" and "none" (all) are accepted."""
    ratio: Annotated[float | None, BeforeValidator(_no_auto)] = None
    """Fraction kept, 0.05 to 1; below 0.15 only with allow_lossy. null: 0.3; policy "none": 1."""
    allow_lossy: bool = False
    """Whether a ratio below 0.15, at which answers suffer, is meant."""
    tokens: Annotated[int | None, only(None)] = None
    """Tokens kept per head, instead of ratio; not supported yet: only null is accepted."""
    neighbours: Annotated[int, only(0)] = 0
    """Chunks seen on each side by local scoring; not supported yet: only 0 is accepted."""
    max_loss: Annotated[float | None, only(None)] = None
    """Highest accepted loss in nats per token; not supported yet: only null is accepted."""
    scoring: Literal["auto", "exact", "local"] = "auto"
    """Scoring "exact" is KVzip as published, "local" its linear-time variant; "auto" is local."""
    normalization: Literal["none", "kvzip_plus"] = "none"
    """With "kvzip_plus" attention is weighed by what values add to the hidden state."""
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8"], only("none", "int8", "int4")
    ] = "none"
    """Bits of each number that is kept; "none" keeps numbers as they are, "fp8" is refused."""

    def spec(self) -> CompressionSpec:
        """Resolve defaults. Raises: InvalidRequest, for values that do not go together."""
        if self.policy == "none":
            if self.ratio not in (None, 1.0):
                raise InvalidRequest("compression.ratio", 'policy "none" keeps everything: 1.0')
            if self.scoring != "auto":
                raise InvalidRequest("compression.scoring", 'policy "none" scores nothing')
            if self.normalization != "none":
                raise InvalidRequest("compression.normalization", 'policy "none" scores nothing')
            return CompressionSpec("none", 1.0, "local", self._quantization)
        ratio = DEFAULT_RATIO if self.ratio is None else self.ratio
        check_ratio("compression.ratio", ratio, allow_lossy=self.allow_lossy)
        scoring: Scoring = "exact" if self.scoring == "exact" else "local"
        return CompressionSpec("kvzip", ratio, scoring, self._quantization, self.normalization)

    @property
    def _quantization(self) -> Quantization:
        match self.quantization:
            case "fp8":
                raise InvalidRequest("compression.quantization", '"fp8" is not supported')
            case known:
                return known
