"""Many questions at once on one engine, with and without a build, against `generate` one by one.

    PYTHONPATH=bench .venv/bin/python bench/serving.py [--quick] [--build-slice-ms MS]

Clients of the engine's thread itself: HTTP is left out. Caches hold random rows, which cost what a
document's cost, and are there at once; documents that are built are random tokens. One run gives
every figure of a row's comparison: rates and percentiles of different runs do not compare. Takes
9 minutes, or 2 with ``--quick``. Results go to bench/results/serving.md.
"""

import argparse
import statistics
from pathlib import Path

from decode_step import random_context
from kvkeep_bench.building import Building
from kvkeep_bench.engine import EngineSide
from kvkeep_bench.machine import Machine
from kvkeep_bench.models import find_model
from kvkeep_bench.samples import progress
from kvkeep_bench.serving_load import Answers, Load
from kvkeep_bench.stock import StockModel

from kvkeep_service.config import load_settings
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.scheduler import Scheduler

TOKENS = 2048
RATIO = 0.3
QUESTION_TOKENS = 12
ANSWER_TOKENS = 48
CLIENTS = (1, 4, 16)
RATES = (0.25, 0.5, 1.0)
"""Questions a second."""
TOGETHER = 16
RESULTS = Path(__file__).parent / "results" / "serving.md"
HEADER = (
    "| load | contexts | build beside | first token p50 / p99, ms | between tokens p50 / p99, ms |"
    " tokens/s | build, of unloaded | p99 / without |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="serving under load, on a CPU")
    parser.add_argument("--quick", action="store_true", help="2 minutes instead of 9")
    parser.add_argument("--build-slice-ms", type=float, default=None)
    options = parser.parse_args()
    machine = Machine.here().line("float32")
    model = find_model("smollm2")
    assert model is not None, "the bundled model is always there"
    engine = EngineSide(model.reference, load_settings().model_cache)
    slice_ms = options.build_slice_ms
    scheduler = Scheduler(
        engine.loaded.language_model,
        max_waiting=64,
        build_slice_seconds=None if slice_ms is None else slice_ms / 1000,
    )
    scheduler.start()
    try:
        bench = Bench(engine, scheduler, seconds=5.0 if options.quick else 24.0)
        lines = [
            *bench.against_generate(StockModel(model.directory, engine.loaded.language_model.dtype))
        ]
        lines += bench.table()
    finally:
        scheduler.stop(60)
    shown = "not set" if slice_ms is None else f"{slice_ms} ms"
    text = "\n".join(
        [
            machine,
            "",
            f"SmolLM2, contexts of {TOKENS} tokens at ratio {RATIO}, questions of {QUESTION_TOKENS}"
            f" tokens, answers of {ANSWER_TOKENS}; KVKEEP_BUILD_SLICE_MS: {shown}.",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    RESULTS.write_text(text)


class Bench:
    """The loads of one run."""

    def __init__(self, engine: EngineSide, scheduler: Scheduler, *, seconds: float) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._seconds = seconds
        contexts = [random_context(engine.loaded, TOKENS) for _ in range(TOGETHER)]
        self._shared = self._load(contexts[:1])
        self._distinct = self._load(contexts)

    def against_generate(self, stock: StockModel) -> list[str]:
        """16 questions on one context together, and as many by ``generate`` one by one."""
        progress(f"{TOGETHER} questions together, and by generate one by one")
        self._shared.together(TOGETHER)
        stock.answer_over(TOKENS, QUESTION_TOKENS, 4)
        theirs, ours = [], []
        for _ in range(3):
            seconds = stock.answer_over(TOKENS, QUESTION_TOKENS, ANSWER_TOKENS)
            theirs.append(ANSWER_TOKENS / seconds)
            ours.append(self._shared.together(TOGETHER).tokens_per_second)
        rate, stock_rate = statistics.median(ours), statistics.median(theirs)
        return [
            f"{TOGETHER} questions at once on one context: {rate:.1f} tokens/s; transformers"
            f" `generate` with the full cache, one by one: {stock_rate:.1f} tokens/s; ratio"
            f" **{rate / stock_rate:.1f}** (bar: at least 7).",
            "",
        ]

    def table(self) -> list[str]:
        """Closed and open loops, each without and with a build beside it."""
        progress("a build alone")
        building = self._build()
        building.wait_for_one()
        unloaded = building.stop()
        lines = [f"A build alone: {unloaded:.0f} document tokens/s.", "", HEADER]
        for clients in CLIENTS:
            for name, load in (("one", self._shared), ("distinct", self._distinct)):
                if clients == 1 and load is self._distinct:
                    continue
                progress(f"{clients} clients, contexts: {name}")
                without = load.closed(clients, self._seconds)
                building = self._build()
                beside = load.closed(clients, self._seconds)
                share = building.stop() / unloaded
                title = f"closed, {clients} clients | {name}"
                lines += [_row(title, without), _row(title, beside, share, without)]
        for rate in RATES:
            progress(f"{rate} questions a second")
            answers = self._distinct.open(rate, 2 * self._seconds)
            lines.append(_row(f"open, {rate}/s | distinct", answers))
        return lines

    def _load(self, contexts: list[ContextView]) -> Load:
        return Load(
            self._engine.loaded,
            self._scheduler,
            contexts,
            question_tokens=QUESTION_TOKENS,
            answer_tokens=ANSWER_TOKENS,
        )

    def _build(self) -> Building:
        model, policy = self._engine.loaded.language_model, self._engine.policy("local", 1024)
        return Building(self._scheduler, model, policy, TOKENS, RATIO)


def _row(
    title: str, answers: Answers, share: float | None = None, without: Answers | None = None
) -> str:
    first, between = answers.first_token_ms, answers.inter_token_ms
    p99 = answers.percentile(between, 99)
    cells = [
        "no" if share is None else "yes",
        f"{answers.percentile(first, 50):.0f} / {answers.percentile(first, 99):.0f}",
        f"{answers.percentile(between, 50):.0f} / {p99:.0f}",
        f"{answers.tokens_per_second:.1f}",
        "" if share is None else f"**{share:.2f}**",
        ""
        if without is None
        else f"**{p99 / without.percentile(without.inter_token_ms, 99):.2f}**",
    ]
    return f"| {title} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
