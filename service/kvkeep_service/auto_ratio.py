"""Which ratio a document needs, when its registration names a loss and not a ratio.

Reading less of a cache loses more, so the smallest ratio that will do is found by bisection. The
same search decides while a build measures, and at registration by what an earlier build measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvkeep_service.ports import Fidelity

MARGIN: Final = 1.5
"""Standard errors that are added to a measured loss before it is compared."""


LIKELY: Final = 0.3


@dataclass(frozen=True, slots=True)
class AutoRatio:
    """What a build is to decide: the smallest of ``candidates`` that loses at most ``max_loss``.

    ``candidates`` ascend; ``max_loss`` is in nats per token. ``cuts`` says where an artifact is
    cut, the last cut included, when a context of it takes a ratio.
    """

    candidates: tuple[float, ...]
    max_loss: float
    cuts: Callable[[float], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """The smallest ratio within the limit."""

    ratio: float


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Not decided before the loss at this ratio is known."""

    ratio: float


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Even the highest ratio loses more than the limit: so much."""

    ratio: float
    loss: float


def smallest_within(
    candidates: Sequence[float], losses: Mapping[float, float], max_loss: float
) -> Found | Unmeasured | Unreachable:
    """Decide by what is known, or say what to measure next.

    ``candidates``: ratios, ascending; ``losses``: in nats per token by ratio, others ignored.
    Where nothing is known yet, the most usual ratio is the first to measure.
    """
    known = {i: losses[ratio] for i, ratio in enumerate(candidates) if ratio in losses}
    above = min((i for i, loss in known.items() if loss <= max_loss), default=len(candidates))
    below = max((i for i in known if i < above), default=-1)
    if unknown := candidates[below + 1 : above]:
        return Unmeasured(LIKELY if LIKELY in unknown else unknown[(len(unknown) - 1) // 2])
    if above < len(candidates):
        return Found(candidates[above])
    return Unreachable(candidates[-1], losses[candidates[-1]])


def cautious_losses(fidelity: Fidelity | None, *, is_exact: bool) -> dict[float, float]:
    """What is to be compared with a limit, by ratio: the measured loss and a margin for luck.

    ``is_exact``: rows are stored as they are, so that all of them together lose nothing.
    """
    losses: dict[float, float] = {}
    if fidelity is not None:
        for item in fidelity.ratios:
            losses[item.ratio] = (fidelity.loss(item.ratio) or 0.0) + MARGIN * item.loss_error
    return losses | {1.0: 0.0} if is_exact else losses
