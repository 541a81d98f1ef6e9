"""A whole build against a plain prefill, and against kvpress's KVzip: time and memory.

    PYTHONPATH=bench .venv/bin/python bench/build.py [--tokens 4000] [--repeats 3] [--threads 2]
        [--model smollm2] [--kvpress PYTHON]

All sides run the same weights in the same dtype on the same tokens, in turns; ratios are of
medians. *Prefill* is the faster of transformers' whole and chunked prefill, without logits. With
one thread, CPU time counts and not the clock on the wall: then others may be at work. Memory is
the resident set of this process at its highest, weights of one model included, and without them.

``--kvpress``: a Python that has kvpress 0.5 and its transformers, in an environment of its own:

    python -m venv PLACE && PLACE/bin/pip install 'kvpress>=0.5,<0.6' torch==2.13.0

SmolLM2 at 4,000 tokens takes about a minute a repetition on two cores, and another with kvpress.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from kvkeep_bench.engine import EngineSide
from kvkeep_bench.kvpress_build import KVPressBuilds
from kvkeep_bench.machine import Machine
from kvkeep_bench.memory import Peak, peak_of
from kvkeep_bench.models import MODEL_NAMES, find_model
from kvkeep_bench.report import Figure, ratio_of, tables
from kvkeep_bench.samples import Samples, progress
from kvkeep_bench.stock import CHUNK_TOKENS, StockModel
from kvkeep_bench.turns import clock_of

from kvkeep_service.config import load_settings
from kvkeep_service.engine.model import LanguageModel

DOCUMENT = Path(__file__).parents[1] / "tests" / "data" / "alice.txt"
# Past the title page and the contents.
DOCUMENT_START = 2000
RATIO = 0.3
WARM_TOKENS = 64
SCORINGS = ("local", "exact")
WHOLE, CHUNKED = "transformers prefill, whole", "transformers prefill, chunked"
KVPRESS, KVPRESS_PREFILL = "kvpress KVzip build", "kvpress prefill"


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    model: str
    tokens: int
    repeats: int
    threads: int
    kvpress: Path | None


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="a whole build against a plain prefill")
    parser.add_argument("--model", choices=MODEL_NAMES, default=MODEL_NAMES[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kvpress", type=Path, help="a Python that has kvpress 0.5")
    found = parser.parse_args()
    return Options(found.model, found.tokens, found.repeats, found.threads, found.kvpress)


class Builds:
    """Everything that is measured, on one model and one document."""

    def __init__(self, options: Options) -> None:
        found = find_model(options.model)
        if found is None:
            raise SystemExit(f"{options.model} is not installed")
        self.directory = found.directory
        self._engine = EngineSide(found.reference, load_settings().model_cache)
        text = self._engine.cut(DOCUMENT.read_text()[DOCUMENT_START:], options.tokens)
        self._plans = {name: self._engine.plan(text, name, RATIO) for name in SCORINGS}
        self._warming = self._engine.plan(self._engine.cut(text, WARM_TOKENS), "local", 1.0)
        document = self._plans["local"].document
        self.ids = [*document.prefix_ids, *document.ids]
        self._clock = time.thread_time if options.threads == 1 else time.perf_counter
        self._stock = StockModel(found.directory, self.model.dtype)
        self.samples = Samples()
        self.peaks: dict[str, Peak] = {}

    @property
    def model(self) -> LanguageModel:
        """Ours; transformers' has weights of its own."""
        return self._engine.loaded.language_model

    def measure(self, repeats: int) -> None:
        """Everything in turns, every other time backwards; then its memory, once more each."""
        ids = torch.tensor([self.ids])
        steps: dict[str, Callable[[], object]] = {
            WHOLE: lambda: self._stock.prefill(ids, None),
            "local": lambda: self._build("local"),
            CHUNKED: lambda: self._stock.prefill(ids, CHUNK_TOKENS),
            "exact": lambda: self._build("exact"),
        }
        # Weights are mapped, and resident only once they have been read.
        self._stock.prefill(ids[:, :WARM_TOKENS], None)
        self._engine.timed_stages(self._warming, (1.0,), self._clock)
        for name, step in steps.items():
            progress(f"memory: {name}")
            _, self.peaks[name] = peak_of(step)
        self.samples = Samples()
        for repeat in range(repeats):
            for name in steps if repeat % 2 == 0 else reversed(steps):
                progress(f"{repeat + 1}/{repeats} {name}")
                started = self._clock()
                steps[name]()
                taken = self._clock() - started
                self.samples.add(f"build, {name}" if name in SCORINGS else name, taken)

    def _build(self, scoring: str) -> None:
        """Once, adding the time of each stage to the samples."""
        stages = self._engine.timed_stages(self._plans[scoring], (RATIO,), self._clock)
        for stage, seconds in stages.items():
            self.samples.add(f"build, {scoring}, {stage}", seconds)

    def figures(self) -> list[Figure]:
        """Ratios, and what they should be."""
        samples = self.samples
        stock = min((WHOLE, CHUNKED), key=samples.median)
        of_prefill = [
            ("whole build / prefill, local", "build, local", "≤ 2.2 at 4K"),
            ("whole build / prefill, exact", "build, exact", ""),
            ("our prefill / prefill", "build, local, prefill", ""),
            ("local scoring / prefill", "build, local, scoring", ""),
            ("exact scoring / prefill", "build, exact, scoring", ""),
            # Short documents are not checked.
            ("measuring what is lost / prefill", "build, local, checking", ""),
        ]
        found = [
            ratio_of(name, samples, above, stock, bar)
            for name, above, bar in of_prefill
            if above in samples.all()
        ]
        if KVPRESS in samples.all():
            name = "whole build / kvpress KVzip build"
            found += [
                ratio_of(f"{name}, local", samples, "build, local", KVPRESS, "≤ 0.5"),
                ratio_of(f"{name}, exact", samples, "build, exact", KVPRESS),
                ratio_of("kvpress build / its own prefill", samples, KVPRESS, KVPRESS_PREFILL),
            ]
        return [*found, *self._memory()]

    def _memory(self) -> list[Figure]:
        weights = sum(part.nbytes for part in self.model._model.parameters())
        prefill = min(self.peaks[name].added_bytes for name in (WHOLE, CHUNKED))
        figures = []
        for scoring in SCORINGS:
            build = self.peaks[scoring].added_bytes
            source = f"{(weights + build) / 1e6:.0f} MB / {(weights + prefill) / 1e6:.0f} MB"
            whole = (weights + build) / (weights + prefill)
            figures.append(Figure(f"peak memory / prefill's, {scoring}", whole, "≤ 1.1", source))
            alone = f"{build / 1e6:.0f} MB / {prefill / 1e6:.0f} MB"
            name = f"the same without weights, {scoring}"
            figures.append(Figure(name, build / prefill, "", alone))
        return figures


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    machine = Machine.here()
    builds = Builds(options)
    builds.measure(options.repeats)
    if options.kvpress is not None:
        # Not in turns with the others: two processes would keep each other from the cores.
        with KVPressBuilds(options.kvpress, builds.directory, options.threads) as kvpress:
            for repeat in range(options.repeats + 1):
                progress(f"kvpress {repeat}/{options.repeats}")
                times = kvpress.build(builds.ids, RATIO)
                # The first one warms up.
                if repeat:
                    builds.samples.add(KVPRESS, times.build_s)
                    builds.samples.add(KVPRESS_PREFILL, times.prefill_s)
    dtype = str(builds.model.dtype).removeprefix("torch.")
    print(f"## {options.model}, {options.tokens} document tokens\n")
    print(f"{machine.line(dtype)}; {clock_of(options.threads)}\n")
    print("\n".join(tables(builds.figures(), builds.samples)))


if __name__ == "__main__":
    main()
