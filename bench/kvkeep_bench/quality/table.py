"""Records as a table with standard errors, and paired differences with 95% intervals."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvkeep_bench.quality.records import Record
from kvkeep_bench.quality.systems import EXACT, FULL, KVPRESS, LOCAL, NO_REMAINDER

_Z95 = 1.96
_RIVALS = {
    LOCAL: (LOCAL + NO_REMAINDER, EXACT, KVPRESS),
    EXACT: (EXACT + NO_REMAINDER, KVPRESS),
    LOCAL + NO_REMAINDER: (EXACT + NO_REMAINDER, KVPRESS),
    EXACT + NO_REMAINDER: (KVPRESS,),
}
"""What a system is compared with at the same ratio."""
Cell = tuple[str, str, float]
"""Suite, system, ratio."""


def markdown(records: Sequence[Record]) -> Iterator[str]:
    """Lines of one section per model."""
    for model in sorted({record.model for record in records}):
        own = [record for record in records if record.model == model]
        yield from (f"## {model}", "", *_scores(own), "", *_differences(own), "")


def _scores(records: Sequence[Record]) -> Iterator[str]:
    cells = _cells(records)
    suites = list(dict.fromkeys(record.suite for record in records))
    ways = list(dict.fromkeys((record.system, record.ratio) for record in records))
    yield "| system | kept | " + " | ".join(suites) + " |"
    yield "|---|---|" + "---|" * len(suites)
    for system, ratio in sorted(ways, key=lambda way: (way[0] != FULL, way[0], -way[1])):
        found = [cells.get((suite, system, ratio)) for suite in suites]
        shown = [_shown(_flat(scores)) if scores else "" for scores in found]
        yield f"| {system} | {ratio:g} | " + " | ".join(shown) + " |"


def _differences(records: Sequence[Record]) -> Iterator[str]:
    """Question by question, in points of 100: against the full cache, and against a rival."""
    cells = _cells(records)
    yield "| suite | system | kept | against | points | 95% interval | questions |"
    yield "|---|---|---|---|---|---|---|"
    for (suite, system, ratio), scores in cells.items():
        for other, at in ((FULL, 1.0), *((rival, ratio) for rival in _RIVALS.get(system, ()))):
            theirs = cells.get((suite, other, at))
            if system == other or theirs is None:
                continue
            pairs = list(_pairs(scores, theirs))
            if len(pairs) < 2:
                continue
            mean, error = 100 * statistics.fmean(pairs), 100 * standard_error(pairs)
            interval = f"{mean - _Z95 * error:+.1f} to {mean + _Z95 * error:+.1f}"
            yield (
                f"| {suite} | {system} | {ratio:g} | {other} "
                f"| {mean:+.1f} | {interval} | {len(pairs)} |"
            )


def _pairs(
    mine: Mapping[str, tuple[float, ...]], theirs: Mapping[str, tuple[float, ...]]
) -> Iterator[float]:
    """Differences of the scores of every question that both were asked."""
    for item, values in mine.items():
        for own, other in zip(values, theirs.get(item, ()), strict=item in theirs):
            yield own - other


def _cells(records: Iterable[Record]) -> Mapping[Cell, dict[str, tuple[float, ...]]]:
    """Scores by item, of each cell."""
    cells: defaultdict[Cell, dict[str, tuple[float, ...]]] = defaultdict(dict)
    for record in records:
        cells[record.suite, record.system, record.ratio][record.item] = record.scores
    return cells


def _flat(scores: Mapping[str, tuple[float, ...]]) -> list[float]:
    return [score for values in scores.values() for score in values]


def _shown(scores: Sequence[float]) -> str:
    error = f" ± {standard_error(scores):.2f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.2f}{error} ({len(scores)})"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values, at least two."""
    return statistics.stdev(values) / math.sqrt(len(values))
