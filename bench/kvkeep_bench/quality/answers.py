"""Answers of our engine: one build a policy, read at every ratio, all questions in one batch."""

from collections.abc import Sequence as Several
from dataclasses import replace

import torch

from kvkeep_bench.engine import TENANT, EngineSide
from kvkeep_bench.quality.items import Item, Question
from kvkeep_bench.quality.systems import PLAIN, System
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence, SequenceOptions, decode_step, prefill_question
from kvkeep_service.plan import BuildPlan
from kvkeep_service.ports import DocumentSpec


class OurSide:
    """The engine of one model, answering items."""

    def __init__(self, engine: EngineSide) -> None:
        """Nothing is built yet."""
        self._engine = engine

    def answers(
        self, item: Item, system: System, ratios: Several[float]
    ) -> dict[float, tuple[str, ...]]:
        """Answers to the item's questions by ratio; ``ratios`` are of the system's."""
        with torch.inference_mode():
            built = self._engine.build(self._plan(item, system, max(ratios)), sorted(ratios))
            return {ratio: self._ask(built.context.view(ratio), item.questions) for ratio in ratios}

    def token_ids(self, item: Item) -> tuple[list[int], list[list[int]]]:
        """What the model sees: the document with its prefix, and each question's suffix."""
        plan = self._engine.planner.plan(TENANT, _document(item), PLAIN)
        document = [*plan.document.prefix_ids, *plan.document.ids]
        return document, [self._engine.question_ids(q.text) for q in item.questions]

    def _plan(self, item: Item, system: System, ratio: float) -> BuildPlan:
        assert system.compression is not None, "kvpress answers elsewhere"
        compression = replace(system.compression, ratio=ratio)
        return self._engine.planner.plan(TENANT, _document(item), compression)

    def _ask(self, context: ContextView, questions: Several[Question]) -> tuple[str, ...]:
        loaded = self._engine.loaded
        model = loaded.language_model
        sequences = [
            Sequence(
                model,
                context,
                self._engine.question_ids(question.text),
                SequenceOptions(question.max_tokens),
                tokenizer=loaded.tokenizer,
                stop_ids=loaded.stop_ids,
            )
            for question in questions
        ]
        texts = [_read(self._engine, sequence) for sequence in sequences]
        while running := [i for i, one in enumerate(sequences) if one.finish_reason is None]:
            outcomes = decode_step(model, [sequences[index] for index in running])
            for index, outcome in zip(running, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    raise outcome
                texts[index] += outcome
        return tuple(texts)


def _read(engine: EngineSide, sequence: Sequence) -> str:
    while (text := prefill_question(engine.loaded.language_model, sequence)) is None:
        pass
    return text


def _document(item: Item) -> DocumentSpec:
    return DocumentSpec(item.document, item.system, item.instructions)
