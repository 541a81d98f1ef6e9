"""Which ratio a document needs, when its registration names a loss and not a ratio.

Reading less of a cache loses more, so the smallest ratio that will do is searched for. The same
search decides while a build measures, and at registration by what an earlier build measured.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvkeep_service.ports import Fidelity

MARGIN: Final = 1.75
"""Standard errors that are added to a measured loss before it is compared."""
REMAINDER_MARGIN: Final = 1.25
"""The same where evicted rows leave remainders: what is lost elsewhere is then less often far from
what was measured, by 1.1 standard errors instead of 1.6 (bench/NOTES.md)."""


LIKELY: Final = 0.3
"""The most usual ratio, which is measured first."""
HALVING: Final = 0.1
"""By so much more kept, about half is lost (bench/NOTES.md). It only says what to measure next."""


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
    To be measured next is the smallest one that may be expected to be within: few can be.
    """
    known = {i: losses[ratio] for i, ratio in enumerate(candidates) if ratio in losses}
    above = min((i for i, loss in known.items() if loss <= max_loss), default=len(candidates))
    below = max((i for i in known if i < above), default=-1)
    if unknown := candidates[below + 1 : above]:
        nearest = candidates[below if below >= 0 else min(above, len(candidates) - 1)]
        return Unmeasured(_next(unknown, nearest, losses.get(nearest, 0.0), max_loss))
    if above < len(candidates):
        return Found(candidates[above])
    return Unreachable(candidates[-1], losses[candidates[-1]])


def smallest_trusted(
    candidates: Sequence[float], losses: Mapping[float, float], max_loss: float
) -> float | None:
    """The smallest ratio that was measured within the limit, or is bounded by its neighbours.

    What each further row is worth falls: so between two ratios that were measured, no more is
    lost than on the straight line between them. None where nothing is within.
    """
    within = [ratio for ratio in candidates if losses.get(ratio, max_loss + 1.0) <= max_loss]
    return min((*within, *_bounded(candidates, losses, max_loss)), default=None)


def searched(
    candidates: Sequence[float], losses: Mapping[float, float], max_loss: float
) -> float | None:
    """What one more build would choose, by what an earlier one has measured; None if not known.

    That is so where no question is open, or all that was measured are the steps of this search:
    it would come to its end there again.
    """
    found = smallest_within(candidates, losses, max_loss)
    known = {ratio: loss for ratio, loss in losses.items() if loss == 0.0}
    while isinstance(found, Unmeasured):
        step = smallest_within(candidates, known, max_loss)
        if not isinstance(step, Unmeasured) or step.ratio not in losses:
            is_over = len(known) == len(losses)
            return smallest_trusted(candidates, losses, max_loss) if is_over else None
        known[step.ratio] = losses[step.ratio]
    return found.ratio if isinstance(found, Found) else None


def _bounded(
    candidates: Sequence[float], losses: Mapping[float, float], max_loss: float
) -> Iterator[float]:
    """Ratios on or under the line between measured ones that is within, from the highest on."""
    measured = sorted(losses)
    for ratio in reversed(candidates):
        place = bisect_left(measured, ratio)
        if place == len(measured) or (place == 0 and measured[0] != ratio):
            return
        upper = measured[place]
        lower = ratio if upper == ratio else measured[place - 1]
        share = 0.0 if upper == lower else (upper - ratio) / (upper - lower)
        if losses[upper] + share * (losses.get(lower, 0.0) - losses[upper]) > max_loss:
            return
        yield ratio


def _next(unknown: Sequence[float], nearest: float, loss: float, max_loss: float) -> float:
    """What to measure of the ratios not known, by the loss at the nearest one that is."""
    if loss == 0.0:
        return LIKELY if LIKELY in unknown else unknown[(len(unknown) - 1) // 2]
    expected = ((ratio, loss * 2 ** ((nearest - ratio) / HALVING)) for ratio in unknown)
    return next((ratio for ratio, lost in expected if lost <= max_loss), unknown[-1])


def margin(*, remainder: bool) -> float:
    """Standard errors that count with a measured loss; ``remainder``: evicted rows leave some."""
    return REMAINDER_MARGIN if remainder else MARGIN


def cautious_losses(
    fidelity: Fidelity | None, *, is_exact: bool, remainder: bool
) -> dict[float, float]:
    """What is to be compared with a limit, by ratio: the measured loss and a margin for luck.

    ``is_exact``: rows are stored as they are, so that all of them together lose nothing.
    ``remainder``: what is evicted leaves remainders.
    """
    errors = margin(remainder=remainder)
    losses: dict[float, float] = {}
    if fidelity is not None:
        for item in fidelity.ratios:
            losses[item.ratio] = (fidelity.loss(item.ratio) or 0.0) + errors * item.loss_error
    return losses | {1.0: 0.0} if is_exact else losses
