"""What became of builds since the start, for metrics: no document, tenant or context is named."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LOSS_NATS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper ends of the classes that losses are counted in; one more is open."""


@dataclass(frozen=True, slots=True)
class BuildCounts:
    """Builds by how they ended, seconds of those committed by phase, and what they lost.

    ``ended``: "committed", or the code their contexts failed with. ``losses``: builds with a
    loss in each class of ``LOSS_NATS``, and above the last; ``loss_sum`` in nats per token.
    """

    ended: Mapping[str, int]
    seconds: Mapping[str, float]
    losses: tuple[int, ...]
    loss_sum: float


class BuildCounter:
    """Counts builds of this process."""

    def __init__(self) -> None:
        """Nothing has been built."""
        self._ended: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._losses = [0] * (len(LOSS_NATS) + 1)
        self._loss_sum = 0.0

    def committed(self, seconds: Mapping[str, float], loss: float | None) -> None:
        """Count a build, its ``seconds`` by phase, and what it lost where that was measured."""
        self._ended["committed"] += 1
        self._seconds.update(seconds)
        if loss is not None:
            self._losses[bisect_left(LOSS_NATS, loss)] += 1
            self._loss_sum += loss

    def failed(self, code: str) -> None:
        """Count a build that ended for good, by the code of its context."""
        self._ended[code] += 1

    @property
    def counts(self) -> BuildCounts:
        """As of now."""
        return BuildCounts(
            dict(self._ended), dict(self._seconds), tuple(self._losses), self._loss_sum
        )
