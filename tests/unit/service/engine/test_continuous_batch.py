"""Anything may happen to an engine in any order: whoever is answered is answered as if alone."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from kvkeep_kernels.layout import RaggedKV
from kvkeep_service.engine.answering import QueryTask
from kvkeep_service.engine.build import BuiltCache, build
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.sampling import SamplingOptions
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.engine.transfer import Found

from .gated import IDLE, RATIOS, WORDS, GatedModel, Listener, answer_alone, policy
from .models import VOCABULARY, random_document, run_build
from .test_scheduler_builds import Building

STEPS = 1000
QUESTIONS = 48
MOST_AT_ONCE = 14
# Two logits as close as this may change places when a matrix has other rows beside them.
NEAR_TIE = 1e-4


class Measured(Sequence):
    """A sequence that notes by how much each of its tokens was the best."""

    needs_logits = True

    def accept(self, next_token: Found) -> str:
        assert next_token.logits is not None
        best, second = next_token.logits.topk(2).values.tolist()
        self.margins = [*getattr(self, "margins", []), best - second]
        return super().accept(next_token)


@dataclass(frozen=True)
class Question:
    """What may be asked; the same again and again, so that it is known what comes out."""

    context: int
    ratio: float
    ids: tuple[int, ...]
    options: SequenceOptions

    def sequence(
        self, model: LanguageModel, contexts: list[ResidentContext], kind: type[Sequence]
    ) -> Sequence:
        view = contexts[self.context].view(self.ratio)
        return kind(model, view, self.ids, self.options, tokenizer=WORDS, stop_ids=frozenset())


@dataclass
class Asked:
    question: int
    task: QueryTask
    listener: Listener


def questions(rng: random.Random) -> list[Question]:
    def one(number: int) -> Question:
        sampling = SamplingOptions()
        if number % 3 == 0:
            sampling = SamplingOptions(1.1, top_p=0.95, top_k=60, seed=number)
        length = rng.choice((1, 3, 12, 40, 270))
        ids = tuple(rng.randrange(VOCABULARY) for _ in range(length))
        options = SequenceOptions(rng.randint(1, 12), sampling)
        return Question(rng.randrange(3), rng.choice(RATIOS), ids, options)

    return [one(number) for number in range(QUESTIONS)]


def reloaded(context: ResidentContext) -> ResidentContext:
    """The same bytes in other memory, as a load brings them; nothing worked out is taken over."""
    layers = []
    for rows in context.layers:
        assert isinstance(rows, RaggedKV)
        start, length = rows.start.clone(), rows.length.clone()
        layers.append(RaggedKV(rows.k.clone(), rows.v.clone(), start, length))
    return replace(context, layers=tuple(layers), _views={})


@dataclass
class History:
    """A thousand random steps, and who is in the engine."""

    rng: random.Random
    model: GatedModel
    scheduler: Scheduler
    contexts: list[ResidentContext]
    questions: list[Question]
    asked: list[Asked] = field(default_factory=list)
    builds: list[Building] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def step(self) -> None:
        kinds = ("ask", "cancel", "wait", "build", "evict", "hold")
        kind = self.rng.choices(kinds, (50, 14, 20, 1, 8, 3))[0]
        self.done[kind] += 1
        match kind:
            case "ask":
                self.ask()
            case "cancel" if running := self.running():
                self.rng.choice(running).task.cancelled.set()
            case "wait" if running := self.running():
                self.rng.choice(running).listener.wait()
            case "build":
                self.build()
            case "evict":
                # Who runs goes on with what it holds; who comes is given what was loaded.
                number = self.rng.randrange(len(self.contexts))
                self.contexts[number] = reloaded(self.contexts[number])
            case "hold":
                # Whoever is asked until the next wait joins all at once.
                self.model.hold_after(0)
            case _:
                pass

    def ask(self) -> None:
        running = self.running()
        if len(running) >= MOST_AT_ONCE:
            self.model.release()
            running[0].listener.wait()
        number = self.rng.randrange(len(self.questions))
        sequence = self.questions[number].sequence(self.model, self.contexts, Sequence)
        task = QueryTask(sequence, Listener(), self.rng.choice("abc"))
        self.scheduler.submit_query(task)
        assert isinstance(task.listener, Listener)
        self.asked.append(Asked(number, task, task.listener))

    def build(self) -> None:
        document = random_document(300, seed=1)
        steps = build(self.model, document, policy=policy(), ratios=RATIOS)
        self.builds.append(Building.submitted(self.scheduler, steps))
        if self.rng.random() < 0.4:
            self.builds[-1].task.cancelled.set()

    def running(self) -> list[Asked]:
        self.model.release()
        return [
            one
            for one in self.asked
            if not one.listener.ended.is_set() and not one.task.cancelled.is_set()
        ]


def test_a_thousand_random_steps_answer_every_question_as_if_it_were_alone(
    plain: LanguageModel, model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    rng = random.Random(20260402)
    asked = questions(rng)
    resident = [built.context for built in contexts]
    alone: list[Measured] = []
    for question in asked:
        one = question.sequence(plain, resident, Measured)
        assert isinstance(one, Measured)
        answer_alone(plain, one)
        alone.append(one)
    reference = run_build(plain, random_document(300, seed=1), policy(), RATIOS)
    history = History(rng, model, scheduler, list(resident), asked)
    for _ in range(STEPS):
        history.step()
    model.release()

    near_ties, whole = 0, 0
    for one in history.asked:
        expected = alone[one.question]
        if not one.task.cancelled.is_set():
            assert one.listener.wait().error is None
        assert one.listener.times_ended <= 1
        found = list(one.task.sequence.generated)
        whole += found == expected.generated
        if found != expected.generated[: len(found)]:
            pairs = zip(found, expected.generated, expected.margins, strict=False)
            is_greedy = not asked[one.question].options.sampling.temperature
            assert is_greedy, "chance is drawn by token, so a rounding error changes no draw"
            assert next(margin for a, b, margin in pairs if a != b) < NEAR_TIE
            near_ties += 1
        elif one.listener.ended.is_set():
            assert "".join(one.listener.pieces) == WORDS.decode(found)
    for building in history.builds:
        built, error = building.wait()
        assert error is None
        if built is not None:
            history.done["built"] += 1
            for ours, theirs in zip(built.context.layers, reference.context.layers, strict=True):
                assert torch.equal(ours.k, theirs.k)
                assert torch.equal(ours.v, theirs.v)
    assert near_ties <= 2, "near ties explain single answers, not many"
    # It did happen: many at once, cancelled ones, builds in between, contexts that came again.
    assert whole > 250
    assert max(model.batches) >= 6
    assert history.done["built"] >= 2
    assert history.done["evict"] > 50
    assert sum(one.task.cancelled.is_set() for one in history.asked) > 50
    assert scheduler.stats() == IDLE
