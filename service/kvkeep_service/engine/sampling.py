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


@dataclass(frozen=True, slots=True)
class Chance:
    """A token's id and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PickedToken:
    """What was picked, and the likeliest tokens in its place, the likeliest first."""

    chosen: Chance
    top: tuple[Chance, ...]


class Sampler:
    """One query's sampler. Its generator is its own, so a seed gives the same in any batch.

    Chance is drawn for each token of the vocabulary, in its order, and not for each rank: logits
    that differ by a rounding error may change places in a ranking, and must not change an answer.
    """

    def __init__(self, options: SamplingOptions) -> None:
        """Seed from the options, or from the system when there is no seed."""
        self._options = options
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is picked, whatever the others are: nobody has to draw."""
        return self._options.temperature == 0.0

    def pick(self, logits: Tensor) -> int:
        """Draw the next token id from [vocabulary] fp32 logits of the host.

        Modifies the generator only.
        """
        ranked, ids = torch.sort(logits.double(), descending=True, stable=True)
        # Relative to the best, so that a tiny temperature gives -inf and not NaN.
        ranked = (ranked - ranked[0]) / max(self._options.temperature, _TINY)
        if self._options.top_k:
            ranked[self._options.top_k :] = -torch.inf
        weights = torch.softmax(ranked, dim=0)
        # Nucleus: the smallest set whose mass reaches top_p; the first token always stays.
        before = torch.cumsum(weights, dim=0) - weights
        weights = torch.where(before < self._options.top_p, weights, 0.0)
        by_id = torch.empty_like(weights).scatter_(0, ids, weights)
        return int(torch.multinomial(by_id, 1, generator=self._generator))


def picked(logits: Tensor, token_id: int, top: int) -> PickedToken:
    """The probability of a token, and of the ``top`` likeliest ones.

    ``logits`` [vocabulary], on the host, are the model's own, before temperature, top-k and top-p;
    the log-softmax is computed in fp32.
    """
    logprobs = torch.log_softmax(logits.float(), dim=0)
    best = torch.topk(logprobs, min(top, len(logprobs)))
    values = torch.cat((logprobs[token_id : token_id + 1], best.values)).tolist()
    chances = [
        Chance(*pair) for pair in zip([token_id, *best.indices.tolist()], values, strict=True)
    ]
    return PickedToken(chances[0], tuple(chances[1:]))
