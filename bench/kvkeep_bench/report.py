"""From samples to figures, and from figures to Markdown and JSON lines."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvkeep_bench.machine import Machine
from kvkeep_bench.samples import Samples
from kvkeep_bench.stored import StoredBytes

_MB = 1e6


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Shared part of the kept sets of local and exact scoring, by ratio kept."""

    chunks: str
    shared: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Result:
    """Everything measured on one model. ``equal_tokens``: of an answer at 1.0, as generate's."""

    model: str
    dtype: str
    tokens_document: int
    tokens_total: int
    answer_tokens: int
    samples: Samples
    overlaps: tuple[Overlaps, ...]
    bytes: StoredBytes
    equal_tokens: int


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio, what it should be, and what it was computed from."""

    name: str
    value: float
    bar: str
    source: str


def markdown(machine: Machine, results: Sequence[Result]) -> str:
    """The whole report: ratios first, then the seconds behind them."""
    lines = ["# The main job against plain transformers", "", *_explanation(), ""]
    for result in results:
        lines += [
            f"## {result.model}, {result.tokens_document} document tokens",
            "",
            machine.line(result.dtype),
            "",
            *tables(figures(result), result.samples),
        ]
        lines.append("")
    return "\n".join(lines)


def tables(found: Sequence[Figure], samples: Samples) -> list[str]:
    """Lines of two tables: ratios, and the measurements that they were computed from."""
    return [
        "| figure | ratio | bar | from |",
        "|---|---|---|---|",
        *(f"| {f.name} | {f.value:.3f} | {f.bar} | {f.source} |" for f in found),
        "",
        "| measured | median | least | most | runs |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {_time(statistics.median(values))} | {_time(min(values))} "
            f"| {_time(max(values))} | {len(values)} |"
            for name, values in samples.all().items()
        ),
    ]


def json_lines(machine: Machine, results: Sequence[Result]) -> str:
    """One object a line: the machine, then every figure and every single measurement."""
    rows: list[dict[str, object]] = [{"kind": "machine", **asdict(machine)}]
    for result in results:
        about = {"model": result.model, "tokens": result.tokens_document, "dtype": result.dtype}
        rows += [{"kind": "figure", **about, **asdict(figure)} for figure in figures(result)]
        rows += [
            {"kind": "seconds", **about, "measure": name, "values": values}
            for name, values in result.samples.all().items()
        ]
        rows.append({"kind": "bytes", **about, **asdict(result.bytes)})
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def figures(result: Result) -> list[Figure]:
    """Every ratio of one model, most important first."""
    return [
        *_builds(result.samples),
        *_first_tokens(result.samples),
        *_steps(result),
        *_overlaps(result.overlaps),
        *_bytes(result.bytes),
    ]


def _builds(samples: Samples) -> Iterator[Figure]:
    ways = ("whole", "chunked")
    way = min(ways, key=lambda way: samples.median(f"transformers prefill, {way}"))
    stock = f"transformers prefill, {way}"
    for scoring, bar in (("local", "≤ 2.2 at 4K"), ("exact", "")):
        build = f"build, {scoring}"
        yield ratio_of(f"whole build / prefill, {scoring} scoring", samples, build, stock, bar)
    yield ratio_of("our prefill / prefill", samples, "build, local, prefill", stock)
    yield ratio_of("local scoring / prefill", samples, "build, local, score", stock)
    yield ratio_of(
        "exact scoring / local scoring", samples, "build, exact, score", "build, local, score"
    )


def _first_tokens(samples: Samples) -> Iterator[Figure]:
    again = "transformers generate, first token"
    yield ratio_of(
        "first token, resident context / re-prefill",
        samples,
        "resident, first token",
        again,
        "≤ 0.10 at 2K, ≤ 0.05 at 4K",
    )
    yield ratio_of(
        "first token, from local disk / re-prefill",
        samples,
        "from disk, first token",
        again,
        "≤ 0.10 at 4K",
    )


def _steps(result: Result) -> Iterator[Figure]:
    samples, stock = result.samples, "transformers generate, step"
    yield ratio_of("decode at 0.3 / at 1.0, same engine", samples, "step at 0.3", "step at 1.0")
    yield ratio_of("decode at 0.3 / transformers generate", samples, "step at 0.3", stock)
    yield ratio_of("decode at 1.0 / transformers generate", samples, "step at 1.0", stock)
    yield Figure(
        "greedy tokens at 1.0 equal to generate's",
        result.equal_tokens / result.answer_tokens,
        "1.000",
        f"{result.equal_tokens} of {result.answer_tokens} tokens",
    )


def _overlaps(overlaps: Sequence[Overlaps]) -> Iterator[Figure]:
    for one in overlaps:
        for ratio, shared in one.shared.items():
            bar = "≥ 0.85 in chunks of 512" if ratio == 0.3 else ""
            yield Figure(f"overlap of local and exact at {ratio}", shared, bar, one.chunks)


def _bytes(stored: StoredBytes) -> Iterator[Figure]:
    slabs, full = f"{stored.slab_bytes / _MB:.2f} MB", f"{stored.full_bytes / _MB:.2f} MB"
    yield Figure(
        "stored slabs / full KV", stored.slab_bytes / stored.full_bytes, "", f"{slabs} / {full}"
    )
    yield Figure(
        "slab bytes beyond K and V / K and V",
        stored.overhead,
        "≤ 0.030",
        f"{stored.slab_bytes - stored.rows_bytes} B / {stored.rows_bytes} B, "
        f"manifest {stored.manifest_bytes} B",
    )


def ratio_of(name: str, samples: Samples, above: str, below: str, bar: str = "") -> Figure:
    """Median of one measure over the median of another."""
    top, bottom = samples.median(above), samples.median(below)
    return Figure(name, top / bottom, bar, f"{_time(top)} {above} / {_time(bottom)} {below}")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _explanation() -> list[str]:
    return [
        "Ratios are of medians, measured in turns in one run, the same weights and dtype on both",
        "sides. *Prefill* is the faster of transformers' whole and chunked (512) prefill, without",
        "logits. *Re-prefill* is `generate` reading document and question again, in the faster of",
        "the two ways. The page cache of the files is dropped before each load from the disk, and",
        "the sentence that is asked is tokenised within our times. A bar names the length it is",
        "set for.",
    ]
