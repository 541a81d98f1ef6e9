"""Repeated measurements by name, and the clock that takes them."""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_STARTED = time.perf_counter()


class Samples:
    """Every value measured, by measure; seconds unless the name says otherwise."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[str, list[float]] = {}

    def add(self, measure: str, value: float) -> None:
        """Record one value. Modifies the samples."""
        self._values.setdefault(measure, []).append(value)

    @contextmanager
    def timed(self, measure: str) -> Iterator[None]:
        """Record the seconds that a ``with`` block takes; one that fails is not recorded."""
        started = time.perf_counter()
        yield
        self.add(measure, time.perf_counter() - started)

    def median(self, measure: str) -> float:
        """Median over the repetitions. Raises: KeyError for what was never measured."""
        return statistics.median(self._values[measure])

    def all(self) -> dict[str, list[float]]:
        """Measures in the order of their first value, with all their values."""
        return {name: list(values) for name, values in self._values.items()}


def progress(text: str) -> None:
    """Say on stderr what happens now, with the seconds since the start."""
    print(f"[{time.perf_counter() - _STARTED:7.1f} s] {text}", file=sys.stderr, flush=True)
