"""Scores of every system, one small plot a suite: SVG files for the documentation."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

# Only wanted with --plot: it is in the dependency group "bench".
import matplotlib as mpl
from matplotlib.figure import Figure

from kvkeep_bench.quality.records import Record
from kvkeep_bench.quality.systems import FULL
from kvkeep_bench.quality.table import standard_error

_WIDTH, _HEIGHT, _HEIGHT_EACH = 6.4, 0.9, 0.26
"""Inches; the height grows with the rows."""


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write one file per model and suite below ``folder``. Returns what was written."""
    groups: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.model, record.suite].append(record)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for (model, suite), own in groups.items():
        path = folder / f"quality-{model}-{suite.replace(' ', '-').lower()}.svg"
        # Without a date and with a salt of its own, so that equal records give an equal file.
        with mpl.rc_context({"svg.hashsalt": path.stem}):
            _figure(suite, own).savefig(path, format="svg", metadata={"Date": None})
        written.append(path)
    return written


def _figure(suite: str, records: Sequence[Record]) -> Figure:
    """A row for each system and ratio: its score, and one standard error to each side."""
    scores: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    for record in records:
        scores[record.system, record.ratio] += record.scores
    rows = [(way, values) for way, values in sorted(scores.items()) if way[0] != FULL]
    figure = Figure(figsize=(_WIDTH, _HEIGHT + _HEIGHT_EACH * len(rows)), layout="constrained")
    axes = figure.subplots()
    if whole := scores.get((FULL, 1.0)):
        axes.axvline(
            statistics.fmean(whole), color="black", linestyle="--", linewidth=1, label=FULL
        )
        axes.legend(fontsize=7, loc="lower left")
    # From top to bottom in the order of the table.
    places = range(len(rows), 0, -1)
    axes.errorbar(
        [statistics.fmean(values) for _, values in rows],
        places,
        xerr=[standard_error(values) for _, values in rows],
        fmt="o",
        markersize=4,
        capsize=2,
    )
    axes.set_yticks(places, [f"{system}, {ratio:g}" for (system, ratio), _ in rows], fontsize=8)
    axes.set(title=suite, xlabel="score", xlim=(-0.03, 1.03), ylim=(0.4, len(rows) + 0.6))
    axes.grid(axis="x", linewidth=0.3)
    return figure
