"""From logits to a token: greedy, or temperature, top-k and top-p with a seed of one's own."""

from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How one query picks tokens. ``temperature`` 0 is greedy; ``top_k`` 0 is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Sampler:
    """One query's sampler. Its generator is its own, so a seed gives the same in any batch."""

    def __init__(self, options: SamplingOptions) -> None:
        """Seed from the options, or from the system when there is no seed."""
        self._options = options
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def pick(self, logits: Tensor) -> int:
        """Pick the next token id from [vocabulary] fp32 logits. Modifies the generator only."""
        if self._options.temperature == 0.0:
            return int(logits.argmax())
        kept, ids = torch.sort(logits.cpu().double(), descending=True, stable=True)
        # Relative to the best, so that a tiny temperature gives -inf and not NaN.
        kept = (kept - kept[0]) / max(self._options.temperature, _TINY)
        if self._options.top_k:
            kept, ids = kept[: self._options.top_k], ids[: self._options.top_k]
        weights = torch.softmax(kept, dim=0)
        # Nucleus: the smallest set whose mass reaches top_p; the first token always stays.
        before = torch.cumsum(weights, dim=0) - weights
        weights = torch.where(before < self._options.top_p, weights, 0.0)
        choice = torch.multinomial(weights, 1, generator=self._generator)
        return int(ids[choice])
