"""The engine side of a benchmark: builds, questions and decoding, driven without a scheduler."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path

from kvkeep_bench.stock import Generated
from kvkeep_service.engine.build import BuiltCache, build
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence, SequenceOptions, decode_step, prefill_question
from kvkeep_service.engine.model import LoadedModel, load_model
from kvkeep_service.plan import BuildPlan, Planner
from kvkeep_service.policies.kvzip import KVzip, RepeatPrompts
from kvkeep_service.ports import CompressionSpec, DocumentSpec, Scoring, Turn

TENANT = "bench"
_RESERVE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What a build kept: (layer, head, position) of every unprotected row, by ratio kept."""

    by_ratio: dict[float, frozenset[tuple[int, int, int]]]

    def overlap(self, other: "KeptRows", ratio: float) -> float:
        """Shared part of two kept sets of the same size, in [0, 1]."""
        mine, theirs = self.by_ratio[ratio], other.by_ratio[ratio]
        return len(mine & theirs) / len(mine)


class EngineSide:
    """One loaded model and the plans of one document."""

    def __init__(self, reference: str, model_cache: Path) -> None:
        """Load as the server does, with its defaults."""
        self.loaded: LoadedModel = load_model(
            reference,
            device="cpu",
            dtype="auto",
            model_cache=model_cache,
            reserve_tokens=_RESERVE_TOKENS,
        )
        self.planner = Planner(self.loaded)
        self._prompts = RepeatPrompts.from_template(self.loaded.template)

    def cut(self, text: str, tokens: int) -> str:
        """The beginning of a text that is ``tokens`` tokens long."""
        piece = self.loaded.template.document_piece(text)
        return text[: piece.offsets[tokens - 1][1]]

    def plan(self, text: str, scoring: Scoring, ratio: float) -> BuildPlan:
        """As the server plans it; ``ratio`` 1.0 keeps everything."""
        compression = CompressionSpec("none" if ratio == 1.0 else "kvzip", ratio, scoring)
        return self.planner.plan(TENANT, DocumentSpec(text), compression)

    def policy(self, scoring: Scoring, chunk_tokens: int, neighbours: int = 0) -> KVzip:
        """A policy with another chunk than the server's own."""
        return KVzip(
            self._prompts,
            scoring=scoring,
            chunk_tokens=chunk_tokens,
            neighbours=neighbours,
            remainder=True,
        )

    def build(
        self, plan: BuildPlan, ratios: Several[float], policy: KVzip | None = None
    ) -> BuiltCache:
        """Run a whole build. ``policy`` overrides the plan's."""
        steps = build(
            self.loaded.language_model,
            plan.document,
            policy=policy or plan.policy,
            ratios=ratios,
            quantization=plan.quantization,
        )
        while True:
            try:
                next(steps)
            except StopIteration as finished:
                built: BuiltCache = finished.value
                return built

    def timed_stages(
        self, plan: BuildPlan, ratios: Several[float], clock: Callable[[], float]
    ) -> dict[str, float]:
        """Run a whole build; seconds of each of its stages by ``clock``, in their order."""
        seconds: dict[str, float] = {}
        last = clock()
        for step in build(
            self.loaded.language_model,
            plan.document,
            policy=plan.policy,
            ratios=ratios,
            quantization=plan.quantization,
        ):
            now = clock()
            seconds[step.stage] = seconds.get(step.stage, 0.0) + now - last
            last = now
        return seconds

    def question_ids(self, question: str) -> list[int]:
        """Token ids that follow the document."""
        return self.loaded.template.asked_ids([Turn("user", question)], {})

    def ask(self, context: ContextView, question: str, tokens: int) -> Generated:
        """Answer a question greedily from a context, never stopping early.

        Times start with the question's text, so its tokenising counts.
        """
        started = time.perf_counter()
        model = self.loaded.language_model
        sequence = Sequence(
            model,
            context,
            self.question_ids(question),
            SequenceOptions(tokens),
            tokenizer=self.loaded.tokenizer,
            stop_ids=frozenset(),
        )
        while prefill_question(model, sequence) is None:
            pass
        first = time.perf_counter()
        while sequence.finish_reason is None:
            (outcome,) = decode_step(model, [sequence])
            if isinstance(outcome, Exception):
                raise outcome
        steps = max(1, tokens - 1)
        step_s = (time.perf_counter() - first) / steps
        return Generated(sequence.generated, first - started, step_s)


def kept_rows(built: BuiltCache) -> KeptRows:
    """Read a build's selection back, at each of its ratios."""
    selection = built.selection
    capacity = selection.counts.sum(dim=0)
    by_ratio: dict[float, frozenset[tuple[int, int, int]]] = {}
    for band, ratio in enumerate(selection.ratios):
        length = selection.counts[: band + 1].sum(dim=0)
        rows: set[tuple[int, int, int]] = set()
        for layer, positions in enumerate(selection.positions):
            runs = positions.split(capacity[layer].tolist())
            for head, run in enumerate(runs):
                kept = run[selection.num_protected : int(length[layer, head])].tolist()
                rows.update((layer, head, position) for position in kept)
        by_ratio[ratio] = frozenset(rows)
    return KeptRows(by_ratio)
