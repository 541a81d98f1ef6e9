"""What a run of the serving benchmark found: lines of a table, kept as JSON lines."""

import json
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path

from kvkeep_bench.serving_load import Answers

_HEADER = (
    "| load | contexts | build beside | first token p50 / p99, ms | between tokens p50 / p99, ms |"
    " tokens/s | build, of unloaded | p99 / without |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Together:
    """Questions asked at once on one context. ``kept``: the fraction of its rows they read."""

    name: str
    model: str
    kept: float
    tokens_per_second: float
    first_token_ms: float
    """The median."""


@dataclass(frozen=True, slots=True)
class Row:
    """One load. ``build_share``: a build's speed beside it, of its unloaded one; None without."""

    load: str
    contexts: str
    first_p50_ms: float
    first_p99_ms: float
    between_p50_ms: float
    between_p99_ms: float
    tokens_per_second: float
    refused: int
    build_share: float | None = None

    @classmethod
    def of(
        cls, load: str, contexts: str, answers: Answers, build_share: float | None = None
    ) -> "Row":
        """The percentiles of what was measured."""
        first, between = answers.first_token_ms, answers.inter_token_ms
        return cls(
            load,
            contexts,
            answers.percentile(first, 50),
            answers.percentile(first, 99),
            answers.percentile(between, 50),
            answers.percentile(between, 99),
            answers.tokens_per_second,
            answers.refused,
            build_share,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """One whole run. ``about`` says what it ran on and of what sizes, a paragraph a line."""

    about: tuple[str, ...]
    together: tuple[Together, ...]
    rows: tuple[Row, ...]

    def without_build(self, row: Row) -> Row | None:
        """The same load with no build beside it."""
        for other in self.rows:
            is_same = (other.load, other.contexts) == (row.load, row.contexts)
            if is_same and other.build_share is None:
                return other
        return None

    def markdown(self) -> str:
        """As results and documentation show it."""
        lines = [paragraph + "\n" for paragraph in self.about]
        if self.together:
            lines += ["| 16 at once on one context | model | rows kept | tokens/s | first token |"]
            lines += ["|---|---|---|---|---|", *map(_together_line, self.together), ""]
        lines += [_HEADER, *(self._line(row) for row in self.rows), ""]
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write all of it as JSON lines; a run that is interrupted leaves the file as it was."""
        kinds = (("together", self.together), ("row", self.rows))
        lines: list[object] = [{"about": self.about}]
        lines += [{kind: asdict(one)} for kind, ones in kinds for one in ones]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @classmethod
    def load(cls, path: Path) -> "Findings":
        """Read what ``save`` wrote."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return cls(
            tuple(lines[0]["about"]),
            tuple(Together(**line["together"]) for line in lines if "together" in line),
            tuple(Row(**line["row"]) for line in lines if "row" in line),
        )

    def _line(self, row: Row) -> str:
        without = None if row.build_share is None else self.without_build(row)
        ratio = "" if without is None else f"**{row.between_p99_ms / without.between_p99_ms:.2f}**"
        cells = [
            row.load,
            row.contexts,
            "no" if row.build_share is None else "yes",
            "none"
            if isnan(row.first_p50_ms)
            else f"{row.first_p50_ms:.0f} / {row.first_p99_ms:.0f}",
            f"{row.between_p50_ms:.0f} / {row.between_p99_ms:.0f}",
            f"{row.tokens_per_second:.1f}" + (f" ({row.refused} refused)" if row.refused else ""),
            "" if row.build_share is None else f"**{row.build_share:.2f}**",
            ratio,
        ]
        return "| " + " | ".join(cells) + " |"


def _together_line(one: Together) -> str:
    return (
        f"| {one.name} | {one.model} | {one.kept:g} | {one.tokens_per_second:.1f} |"
        f" {one.first_token_ms:.0f} ms |"
    )
