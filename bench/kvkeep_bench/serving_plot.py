"""The serving benchmark drawn: distances between tokens with and without a build, and rates."""

from pathlib import Path

# Only wanted with --docs: it is in the dependency group "bench".
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvkeep_bench.serving_rows import Findings, Row

_INCHES = (7.4, 3.4)
_HALF = 0.38
"""Width of a bar, of two that stand side by side."""


def draw(findings: Findings, folder: Path) -> None:
    """Write two SVG files below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "serving-between-tokens.svg": _between(findings),
        "serving-rates.svg": _rates(findings),
    }
    for name, figure in drawn.items():
        # Without a date, so that equal findings give an equal file.
        figure.savefig(folder / name, format="svg", metadata={"Date": None})


def _between(findings: Findings) -> Figure:
    """Bars up to p99, a mark at p50; without and with a build side by side."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    beside = [row for row in findings.rows if row.build_share is not None]
    for place, row in enumerate(beside):
        without = findings.without_build(row)
        if without is not None:
            _bar(axes, place - _HALF / 2, without, "tab:blue", "without a build, p99", place)
        _bar(axes, place + _HALF / 2, row, "tab:orange", "beside a build, p99", place)
    axes.set_xticks(range(len(beside)), [_name(row) for row in beside], fontsize=7)
    axes.set(ylabel="ms between tokens", title="Two tokens of one answer: p99 (line: p50)")
    axes.legend(fontsize=7)
    return figure


def _bar(axes: Axes, x: float, row: Row, color: str, label: str, place: int) -> None:
    axes.bar(x, row.between_p99_ms, _HALF, color=color, label=None if place else label)
    axes.hlines(row.between_p50_ms, x - _HALF / 2, x + _HALF / 2, color="black", linewidth=1)


def _rates(findings: Findings) -> Figure:
    """Tokens a second: questions at once against others, and the loads without a build."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    together, loads = figure.subplots(1, 2)
    names = [f"{one.name}\n{one.model}, kept {one.kept:g}" for one in findings.together]
    rates = [one.tokens_per_second for one in findings.together]
    together.barh(range(len(names)), rates, color="tab:blue")
    together.set_yticks(range(len(names)), names, fontsize=6)
    together.set(xlabel="tokens/s", title="16 at once, one context")
    alone = [row for row in findings.rows if row.build_share is None]
    loads.barh(range(len(alone)), [row.tokens_per_second for row in alone], color="tab:blue")
    loads.set_yticks(range(len(alone)), [_name(row) for row in alone], fontsize=6)
    loads.set(xlabel="tokens/s", title="SmolLM2 under load")
    for axes in (together, loads):
        axes.invert_yaxis()
    return figure


def _name(row: Row) -> str:
    return f"{row.load}\n{row.contexts}"
