"""What a build lost, as it is kept: measured once, read by whoever shows or decides by it.

Losses are negative log likelihoods of document tokens in nats, averaged over the tokens that were
counted. ``ratio`` is the fraction of the KV pairs that is kept. Pure, no I/O.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Self

from kvkeep_storage.errors import Invalid


@dataclass(frozen=True, slots=True)
class RatioFidelity:
    """What reading the cache at one ratio costs.

    ``top1_agreement``: share of tokens whose most likely successor is the full cache's too.
    ``loss_error``: standard error of ``nll_kept`` less ``nll_full``, spans taken as independent.
    Raises: Invalid, naming the field and the limit.
    """

    ratio: float
    nll_kept: float
    top1_agreement: float
    loss_error: float

    def __post_init__(self) -> None:
        _check(0.0 < self.ratio <= 1.0, "ratio", self.ratio, "above 0, up to 1")
        _check(_is_size(self.nll_kept), "nll_kept", self.nll_kept, "0 or more")
        _check(0.0 <= self.top1_agreement <= 1.0, "top1_agreement", self.top1_agreement, "0 to 1")
        _check(_is_size(self.loss_error), "loss_error", self.loss_error, "0 or more")


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What was measured of one cache: the same tokens at every ratio, and from the full cache.

    ``spans`` pieces of the document with ``tokens`` counted tokens in all; ``ratios`` ascend.
    Raises: Invalid, naming the field and the limit.
    """

    spans: int
    tokens: int
    nll_full: float
    ratios: tuple[RatioFidelity, ...]

    def __post_init__(self) -> None:
        _check(self.spans >= 1, "spans", self.spans, "1 or more")
        _check(self.tokens >= self.spans, "tokens", self.tokens, f"{self.spans} or more")
        _check(_is_size(self.nll_full), "nll_full", self.nll_full, "0 or more")
        named = [item.ratio for item in self.ratios]
        _check(named == sorted(set(named)), "ratios", named, "ascending")

    def at(self, ratio: float) -> RatioFidelity | None:
        """What was measured at exactly this ratio; None when nothing was."""
        return next((item for item in self.ratios if item.ratio == ratio), None)

    def loss(self, ratio: float) -> float | None:
        """What reading at this ratio loses, nats per token; None where it was not measured.

        Fewer rows that do better lose nothing.
        """
        found = self.at(ratio)
        return None if found is None else max(0.0, found.nll_kept - self.nll_full)

    def with_those_of(self, earlier: "Fidelity | None") -> "Fidelity":
        """Also what an earlier build measured of the same rows, at ratios not measured now."""
        if earlier is None or (earlier.spans, earlier.tokens) != (self.spans, self.tokens):
            return self
        measured = {item.ratio: item for item in (*earlier.ratios, *self.ratios)}
        return replace(self, ratios=tuple(measured[ratio] for ratio in sorted(measured)))

    def to_json(self) -> str:
        """As text for a record; equal values give equal texts."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote. Raises: ValueError, TypeError for anything else."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise TypeError("fidelity is not an object")
        ratios = tuple(RatioFidelity(**item) for item in content.pop("ratios", ()))
        return cls(**content, ratios=ratios)


def _is_size(value: float) -> bool:
    return math.isfinite(value) and value >= 0.0


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise Invalid(f"fidelity.{name}", f"{value} is not {wanted}")
