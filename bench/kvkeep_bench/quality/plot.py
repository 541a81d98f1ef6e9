"""Scores over the fraction kept, one small plot a suite: SVG files for the documentation."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

# Only wanted with --plot: it is in the dependency group "bench".
from matplotlib.figure import Figure

from kvkeep_bench.quality.records import Record
from kvkeep_bench.quality.systems import FULL

_INCHES = (4.2, 3.0)


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write one file per model and suite below ``folder``. Returns what was written."""
    groups: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.model, record.suite].append(record)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for (model, suite), own in groups.items():
        path = folder / f"{model}-{suite.replace(' ', '-').lower()}.svg"
        # Without a date, so that equal records give an equal file.
        _figure(suite, own).savefig(path, format="svg", metadata={"Date": None})
        written.append(path)
    return written


def _figure(suite: str, records: Sequence[Record]) -> Figure:
    scores: defaultdict[str, defaultdict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for record in records:
        scores[record.system][record.ratio] += record.scores
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    for system, by_ratio in sorted(scores.items()):
        points = sorted((ratio, statistics.fmean(values)) for ratio, values in by_ratio.items())
        if system == FULL:
            axes.axhline(points[-1][1], color="black", linestyle="--", linewidth=1, label=system)
        else:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=system)
    axes.set(title=suite, xlabel="fraction kept", ylabel="score", ylim=(-0.03, 1.03))
    axes.legend(fontsize=6)
    return figure
