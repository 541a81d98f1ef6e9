"""The loads of one run of the serving benchmark."""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from decode_step import random_context

from kvkeep_bench.building import Building
from kvkeep_bench.engine import EngineSide
from kvkeep_bench.llama_side import LlamaSide
from kvkeep_bench.models import BenchModel, find_model
from kvkeep_bench.samples import progress
from kvkeep_bench.serving_load import Answers, Load
from kvkeep_bench.serving_rows import Row, Together
from kvkeep_bench.stock import StockModel
from kvkeep_service.config import load_settings
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.policies.kvzip import CHUNK_TOKENS

_PIECES = 3
"""A row with a build and one without are measured by turns, as a machine is not always as fast."""
_TIMES = 3
"""What is asked at once is asked so often; the median counts."""
_TIMES_SLOW = 2
"""The same of the larger model."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what is measured. ``seconds``: of every row."""

    seconds: float
    tokens: int = 2048
    ratio: float = 0.3
    question_tokens: int = 12
    answer_tokens: int = 48
    together: int = 16

    def line(self) -> str:
        """In words."""
        return (
            f"SmolLM2, contexts of {self.tokens} tokens at ratio {self.ratio}, questions of"
            f" {self.question_tokens} tokens, answers of {self.answer_tokens};"
            f" {self.seconds:g} s a row, in {_PIECES} pieces."
        )


class Bench:
    """One engine with its loads. Use it as a context manager: leaving it stops the engine."""

    def __init__(
        self, sizes: Sizes, build_slice_ms: float | None, model: BenchModel | None = None
    ) -> None:
        """``model`` None: SmolLM2."""
        self._sizes = sizes
        self._model = model or _model("smollm2")
        self._engine = EngineSide(self._model.reference, load_settings().model_cache)
        self._scheduler = Scheduler(
            self._engine.loaded.language_model,
            max_waiting=64,
            build_slice_seconds=None if build_slice_ms is None else build_slice_ms / 1000,
        )
        self._scheduler.start()
        self._contexts = [self._context() for _ in range(sizes.together)]
        self.remarks: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.stop(60)

    def against_generate(self) -> list[Together]:
        """Questions on one context together, and as many by ``generate`` one by one."""
        sizes, count = self._sizes, self._sizes.together
        progress(f"{count} questions together, and by generate one by one")
        stock = StockModel(self._model.directory, self._engine.loaded.language_model.dtype)
        stock.answer_over(sizes.tokens, sizes.question_tokens, 4)
        self.together()
        theirs, ours = [], []
        for _ in range(_TIMES):
            theirs.append(
                stock.answer_over(sizes.tokens, sizes.question_tokens, sizes.answer_tokens)
            )
            ours.append(self.together())
        rate = sizes.answer_tokens / statistics.median(theirs)
        mine = _found("kvkeep, float32", self._model, sizes.ratio, ours)
        self.remarks.append(
            f"Against `generate`, one by one: **{mine.tokens_per_second / rate:.1f}** times the"
            " tokens a second (bar: at least 7)."
        )
        # Half of them have had their first token when as many have been answered.
        half_ms = 1000 * statistics.median(theirs) * count / 2
        return [mine, Together("generate, one by one", self._model.name, 1.0, rate, half_ms)]

    def together(self, answer_tokens: int | None = None) -> Answers:
        """Questions on one context, all at once."""
        load = self._load(self._contexts[:1], answer_tokens)
        return load.together(self._sizes.together)

    def closed(self, clients: Sequence[int]) -> list[Row]:
        """So many clients, without and with a build beside them."""
        progress("a build alone")
        building = self._building()
        alone = building.one_alone()
        rate = self._sizes.tokens / alone.seconds_for_one
        self.remarks.append(f"A build alone: {rate:.0f} document tokens/s.")
        rows: list[Row] = []
        for count in clients:
            for contexts, name in ((self._contexts[:1], "one"), (self._contexts, "distinct")):
                if count == 1 and len(contexts) > 1:
                    continue
                progress(f"{count} clients, contexts: {name}")
                load, seconds = self._load(contexts), self._sizes.seconds / _PIECES
                without, beside, shares = [], [], []
                for _ in range(_PIECES):
                    without.append(load.closed(count, seconds))
                    building.go_on()
                    answers = load.closed(count, seconds)
                    building.pause()
                    beside.append(answers)
                    shares.append(
                        building.course.share_between(answers.began, answers.ended, alone)
                    )
                title = f"closed, {count} client{'s' if count > 1 else ''}"
                alone_row = Row.of(title, name, Answers.joined(without))
                share = statistics.fmean(shares)
                beside_row = Row.of(title, name, Answers.joined(beside), share)
                rows += [alone_row, beside_row]
                p99s = f"{alone_row.between_p99_ms:.0f}, {beside_row.between_p99_ms:.0f} ms"
                progress(f"p99 between tokens {p99s}, a build at {share:.2f}")
        return rows

    def open(self, rates: Sequence[float]) -> list[Row]:
        """Questions that arrive at random, so many a second."""
        rows = []
        for rate in rates:
            progress(f"{rate} questions a second")
            answers = self._load(self._contexts).open(rate, 2 * self._sizes.seconds)
            rows.append(Row.of(f"open, {rate:g}/s", "distinct", answers))
        return rows

    def _context(self) -> ContextView:
        return random_context(self._engine.loaded, self._sizes.tokens)

    def _load(self, contexts: list[ContextView], answer_tokens: int | None = None) -> Load:
        return Load(
            self._engine.loaded,
            self._scheduler,
            contexts,
            question_tokens=self._sizes.question_tokens,
            answer_tokens=answer_tokens or self._sizes.answer_tokens,
        )

    def _building(self) -> Building:
        sizes, model = self._sizes, self._engine.loaded.language_model
        policy = self._engine.policy("local", CHUNK_TOKENS["local"])
        return Building(self._scheduler, model, policy, sizes.tokens, sizes.ratio)


@dataclass(frozen=True, slots=True)
class AgainstLlama:
    """What llama.cpp's server, and ours, made of the same; and what is not equal, in words."""

    together: tuple[Together, ...]
    remark: str

    @classmethod
    def measured(cls, sizes: Sizes, python: Path) -> "AgainstLlama":
        """Questions on one context at once, of Qwen2.5. ``python`` has xllamacpp."""
        progress("llama.cpp's server: first ours, with its model")
        model = _model("qwen2.5")
        with Bench(sizes, None, model) as bench:
            bench.together(answer_tokens=2)
            ours = [bench.together() for _ in range(_TIMES_SLOW)]
        progress("llama.cpp's server itself")
        theirs, about = _llama_answers(sizes, python, model)
        return cls(
            (
                _found("kvkeep, float32", model, sizes.ratio, ours),
                _found("llama.cpp's server, Q4_K_M", model, 1.0, theirs),
            ),
            f"llama.cpp's server ({about}) runs the GGUF's own 4 to 6 bit weights and has rows in"
            " float16, all of them, in every slot; kvkeep runs the same weights unpacked to"
            " float32, has rows in float32, and reads those it kept once for all who ask. It is"
            " asked over HTTP, kvkeep's engine is not. Both have read the context before.",
        )


def _found(name: str, model: BenchModel, kept: float, answers: Sequence[Answers]) -> Together:
    return Together(
        name,
        model.name,
        kept,
        statistics.median(one.tokens_per_second for one in answers),
        statistics.median(one.percentile(one.first_token_ms, 50) for one in answers),
    )


def _model(name: str) -> BenchModel:
    model = find_model(name)
    if model is None:
        raise SystemExit(f"{name} is not installed: see bench/main_job.py")
    return model


def _llama_answers(sizes: Sizes, python: Path, model: BenchModel) -> tuple[list[Answers], str]:
    """Random tokens, as ours: what they say costs nothing. Also what answered."""
    draw = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(100, 20_000, (count,), generator=draw).tolist()

    room = sizes.tokens + sizes.question_tokens + sizes.answer_tokens + 64
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        log = Path(folder, "server.log")
        with (
            log.open("wb") as errors,
            LlamaSide(
                python,
                Path(model.reference),
                slots=sizes.together,
                slot_tokens=room,
                threads=torch.get_num_threads(),
                folder=Path(folder),
                errors=errors,
            ) as side,
        ):
            context = some(sizes.tokens)
            side.read_context(context)
            answers = []
            # The first one finds everything cold, and is short.
            for answer_tokens in (2, *[sizes.answer_tokens] * _TIMES_SLOW):
                questions = [some(sizes.question_tokens) for _ in range(sizes.together)]
                answers.append(side.together(context, questions, answer_tokens))
            return answers[1:], side.about
