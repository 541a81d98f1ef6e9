"""Many queries and builds on one engine: each as if it were alone, none harming another."""

import gc
import random
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from kvkeep_service.engine import scheduler as scheduler_module
from kvkeep_service.engine.build import BuiltCache, Progress, build
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.sampling import SamplingOptions
from kvkeep_service.engine.scheduler import BuildTask, QueryTask, Scheduler, SchedulerStats
from kvkeep_service.errors import Overloaded, WorkerUnavailable
from kvkeep_service.policies.kvzip import KVzip

from .gated import (
    PATIENCE_SECONDS,
    PROMPTS,
    WORDS,
    GatedModel,
    Listener,
    answer_alone,
    sequence,
    submit,
)
from .models import VOCABULARY, engine_model, random_document, run_build, stock_model

RATIOS = (0.1, 0.3, 0.6)
IDLE = SchedulerStats(running=0, waiting=0, builds=0, is_alive=True)
# Two logits as close as this may change places when a matrix has other rows beside them.
NEAR_TIE = 1e-4
AT_ONCE = 8


@pytest.fixture(scope="module")
def plain() -> LanguageModel:
    return engine_model(stock_model("llama"))


@pytest.fixture(scope="module")
def contexts(plain: LanguageModel) -> list[BuiltCache]:
    return [
        run_build(plain, random_document(tokens, seed=tokens), policy(), RATIOS)
        for tokens in (260, 400, 610)
    ]


@pytest.fixture
def model(plain: LanguageModel) -> GatedModel:
    return GatedModel(plain)


@pytest.fixture
def scheduler(model: GatedModel) -> Iterator[Scheduler]:
    started = Scheduler(model, max_waiting=100)
    started.start()
    yield started
    model.release()
    assert started.stop(PATIENCE_SECONDS)


def policy() -> KVzip:
    return KVzip(PROMPTS, scoring="local", chunk_tokens=128)


def words(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


class Measured(Sequence):
    """A sequence that notes by how much each of its tokens was the best."""

    margins: list[float]

    def accept(self, logits: torch.Tensor) -> str:
        best, second = logits.topk(2).values.tolist()
        self.margins = [*getattr(self, "margins", []), best - second]
        return super().accept(logits)


@dataclass
class Building:
    """Takes what the engine says of one build."""

    task: BuildTask
    progress: list[Progress] = field(default_factory=list)
    outcomes: list[tuple[BuiltCache | None, BaseException | None]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def submitted(
        cls, scheduler: Scheduler, steps: Generator[Progress, None, BuiltCache]
    ) -> "Building":
        building = cls(BuildTask(steps, lambda _: None, lambda *_: None))
        building.task.on_progress = building.progress.append
        building.task.on_finished = building._finish
        scheduler.submit_build(building.task)
        return building

    def _finish(self, built: BuiltCache | None, error: BaseException | None) -> None:
        self.outcomes.append((built, error))
        self.ended.set()

    def wait(self) -> tuple[BuiltCache | None, BaseException | None]:
        assert self.ended.wait(PATIENCE_SECONDS), "the build did not end"
        (outcome,) = self.outcomes
        return outcome


def run_some_at_once(
    scheduler: Scheduler, model: GatedModel, asked: list[Sequence], at_once: int
) -> None:
    """Submit all, so many at a time; return when all have ended well."""
    # Held until the first of them are there, so that they do meet.
    model.hold_after(0)
    room = threading.Semaphore(at_once)

    class Releasing(Listener):
        def on_finished(self, error: BaseException | None) -> None:
            super().on_finished(error)
            room.release()

    listeners = [Releasing() for _ in asked]
    for number, (one, listener) in enumerate(zip(asked, listeners, strict=True), 1):
        assert room.acquire(timeout=PATIENCE_SECONDS)
        scheduler.submit_query(QueryTask(one, listener))
        if number == at_once:
            model.release()
    for one, listener in zip(asked, listeners, strict=True):
        assert listener.wait().error is None
        assert "".join(listener.pieces) == WORDS.decode(one.generated)


def settle(scheduler: Scheduler, model: GatedModel, view: ContextView) -> None:
    """Return once the engine has seen everything that was asked, or cancelled, before."""
    # Three tokens: whoever still runs beside it gets two more at least.
    _, listener = submit(scheduler, sequence(model, view, [1], SequenceOptions(3)))
    assert listener.wait().error is None


def test_fifty_queries_eight_at_a_time_answer_as_each_alone(
    plain: LanguageModel, model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    rng = random.Random(5)
    questions = [
        # Some questions are longer than one slice.
        (contexts[n % 3].context.view(rng.choice(RATIOS)), words(rng.choice((1, 9, 300)), seed=n))
        for n in range(50)
    ]
    lengths = [rng.randint(6, 9) for _ in questions]

    def ask(inner: LanguageModel, kind: type[Sequence]) -> list[Sequence]:
        return [
            kind(inner, view, ids, SequenceOptions(length), tokenizer=WORDS, stop_ids=frozenset())
            for (view, ids), length in zip(questions, lengths, strict=True)
        ]

    alone, together = ask(plain, Measured), ask(model, Sequence)
    for one in alone:
        answer_alone(plain, one)
    order = list(range(50))
    rng.shuffle(order)
    run_some_at_once(scheduler, model, [together[n] for n in order], AT_ONCE)

    near_ties = 0
    for lone, shared in zip(alone, together, strict=True):
        assert isinstance(lone, Measured)
        if lone.generated == shared.generated:
            continue
        pairs = zip(lone.generated, shared.generated, lone.margins, strict=True)
        assert next(margin for a, b, margin in pairs if a != b) < NEAR_TIE
        near_ties += 1
    assert near_ties <= 1, "near ties explain single answers, not many"
    assert len({tuple(one.generated) for one in alone}) > 40, "equal answers would prove little"
    # The first has six tokens to go when the third, read in two slices at most, joins.
    assert 3 <= max(model.batches) <= AT_ONCE
    assert scheduler.stats() == IDLE


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(
    plain: LanguageModel, model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    view = contexts[0].context.view(0.3)

    def sampled(inner: LanguageModel) -> list[Sequence]:
        return [
            sequence(
                inner,
                view,
                words(4, seed=1),
                SequenceOptions(16, SamplingOptions(1.2, top_p=0.95, top_k=40, seed=seed)),
            )
            for seed in range(6)
        ]

    alone = [answer_alone(plain, one) for one in sampled(plain)]
    together = sampled(model)
    run_some_at_once(scheduler, model, together, 6)
    assert [one.generated for one in together] == alone
    assert len({tuple(ids) for ids in alone}) == 6
    assert max(model.batches) == 6


def test_two_ratios_of_one_context_decode_together_rightly(
    plain: LanguageModel, model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    question = words(12, seed=8)
    views = [contexts[1].context.view(ratio) for ratio in RATIOS]
    alone = [
        answer_alone(plain, sequence(plain, view, question, SequenceOptions(24))) for view in views
    ]
    together = [sequence(model, view, question, SequenceOptions(24)) for view in views]
    run_some_at_once(scheduler, model, together, 3)
    assert [one.generated for one in together] == alone
    assert alone[0] != alone[1] != alone[2], "ratios that answer alike would hide a mix-up"
    assert max(model.batches) == 3


def test_a_cancelled_sequence_gets_at_most_one_more_forward(
    model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    asked = sequence(model, contexts[0].context.view(0.1), [1, 2], SequenceOptions(1000))
    model.hold_after(5)
    task, listener = submit(scheduler, asked)
    model.wait_until_held()
    task.cancelled.set()
    model.release()
    settle(scheduler, model, contexts[0].context.view(0.1))
    # The question, four tokens, the one in progress; the last three are those of ``settle``.
    assert model.batches == [1] * 9
    assert len(asked.generated) == 6
    assert listener.times_ended == 0


def test_a_query_cancelled_while_it_waits_is_never_run(
    model: GatedModel,
    scheduler: Scheduler,
    contexts: list[BuiltCache],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_RUNNING", 1)
    view = contexts[0].context.view(0.1)
    model.hold_after(0)
    _, first = submit(scheduler, sequence(model, view, [1], SequenceOptions(2)))
    model.wait_until_held()
    waiting = sequence(model, view, [1], SequenceOptions(2))
    task, _ = submit(scheduler, waiting)
    task.cancelled.set()
    model.release()
    first.wait()
    settle(scheduler, model, view)
    assert waiting.generated == []
    assert scheduler.stats() == IDLE


def test_no_more_than_the_limit_decode_together_and_all_are_answered(
    model: GatedModel,
    scheduler: Scheduler,
    contexts: list[BuiltCache],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_RUNNING", 3)
    view = contexts[0].context.view(0.1)
    asked = [sequence(model, view, [n], SequenceOptions(9)) for n in range(10)]
    run_some_at_once(scheduler, model, asked, 10)
    assert max(model.batches) == 3


def test_a_full_queue_refuses_one_more_and_forgets_who_gave_up(
    model: GatedModel, contexts: list[BuiltCache]
) -> None:
    scheduler = Scheduler(model, max_waiting=2)
    scheduler.start()
    view = contexts[0].context.view(0.1)

    def ask() -> tuple[QueryTask, Listener]:
        return submit(scheduler, sequence(model, view, [1], SequenceOptions(1)))

    model.hold_after(0)
    _, running = ask()
    model.wait_until_held()
    (gives_up, _), (_, second) = ask(), ask()
    with pytest.raises(Overloaded) as refused:
        ask()
    assert refused.value.max_queue == 2
    assert scheduler.stats() == SchedulerStats(1, 2, 0, is_alive=True)
    gives_up.cancelled.set()
    _, third = ask()
    model.release()
    for listener in (running, second, third):
        assert listener.wait().error is None
    assert scheduler.stop(PATIENCE_SECONDS)


def test_a_question_that_cannot_be_read_fails_alone(
    model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    view = contexts[0].context.view(0.1)
    good = [submit(scheduler, sequence(model, view, [n], SequenceOptions(6))) for n in range(3)]
    _, bad = submit(scheduler, sequence(model, view, [VOCABULARY + 5], SequenceOptions(6)))
    assert isinstance(bad.wait().error, IndexError)
    assert bad.times_ended == 1
    assert [listener.wait().error for _, listener in good] == [None] * 3
    settle(scheduler, model, view)
    assert scheduler.stats() == IDLE


def test_a_sequence_whose_token_cannot_be_picked_fails_alone(
    model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    view = contexts[0].context.view(0.1)

    class Poisoned(Sequence):
        def accept(self, logits: torch.Tensor) -> str:
            return super().accept(logits * torch.nan if len(self.generated) == 3 else logits)

    model.hold_after(0)
    good = [submit(scheduler, sequence(model, view, [n], SequenceOptions(8))) for n in range(3)]
    _, bad = submit(
        scheduler,
        Poisoned(model, view, [4], SequenceOptions(8), tokenizer=WORDS, stop_ids=frozenset()),
    )
    model.release()
    assert isinstance(bad.wait().error, FloatingPointError)
    assert "w" in "".join(bad.pieces)
    for task, listener in good:
        assert listener.wait().error is None
        assert len(task.sequence.generated) == 8
    # It did decode with the others.
    assert max(model.batches) == 4


def test_a_forward_that_fails_ends_its_queries_with_the_error_and_not_the_engine(
    model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    view = contexts[0].context.view(0.1)
    model.hold_after(4)
    both = [submit(scheduler, sequence(model, view, [n], SequenceOptions(50))) for n in range(2)]
    model.wait_until_held()
    model.error = MemoryError("out of memory")
    model.release()
    assert [listener.wait().error for _, listener in both] == [model.error] * 2
    model.error = None
    settle(scheduler, model, view)
    assert scheduler.stats() == IDLE


def test_stopping_tells_everybody_who_waits_and_refuses_the_rest(
    model: GatedModel, contexts: list[BuiltCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_RUNNING", 1)
    scheduler = Scheduler(model, max_waiting=9)
    with pytest.raises(WorkerUnavailable):
        submit(scheduler, sequence(model, contexts[0].context.view(0.1), [1], SequenceOptions(1)))
    scheduler.start()
    view = contexts[0].context.view(0.1)
    model.hold_after(2)
    listeners = [
        submit(scheduler, sequence(model, view, [n], SequenceOptions(100)))[1] for n in range(3)
    ]
    closed: list[str] = []
    builds = [Building.submitted(scheduler, _endless(closed)) for _ in range(2)]
    model.wait_until_held()
    assert not scheduler.stop(deadline_seconds=0), "it is in a forward"
    assert not scheduler.stats().is_alive
    model.release()
    for listener in listeners:
        assert isinstance(listener.wait().error, WorkerUnavailable)
        assert listener.times_ended == 1
    for building in builds:
        built, error = building.wait()
        assert built is None
        assert isinstance(error, WorkerUnavailable)
    # The second was never begun, so it had nothing to close.
    assert closed == ["closed"]
    assert scheduler.stop(PATIENCE_SECONDS)
    assert scheduler.stats() == SchedulerStats(0, 0, 0, is_alive=False)
    with pytest.raises(WorkerUnavailable):
        submit(scheduler, sequence(model, view, [1], SequenceOptions(1)))
    with pytest.raises(WorkerUnavailable):
        Building.submitted(scheduler, _endless(closed))


def test_a_build_between_answers_changes_neither(
    plain: LanguageModel, model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    document = random_document(500, seed=77)
    view = contexts[2].context.view(0.3)
    expected = answer_alone(plain, sequence(plain, view, [3, 4], SequenceOptions(40)))
    model.hold_after(0)
    asked = sequence(model, view, [3, 4], SequenceOptions(40))
    _, listener = submit(scheduler, asked)
    building = Building.submitted(scheduler, build(model, document, policy=policy(), ratios=RATIOS))
    model.release()
    built, error = building.wait()
    assert listener.wait().error is None
    assert asked.generated == expected
    assert error is None
    assert built is not None
    reference = run_build(plain, document, policy(), RATIOS)
    for ours, theirs in zip(built.context.layers, reference.context.layers, strict=True):
        assert torch.equal(ours.k, theirs.k)
        assert torch.equal(ours.v, theirs.v)
    fractions = [progress.fraction for progress in building.progress]
    assert fractions == sorted(fractions)
    assert {progress.stage for progress in building.progress} == {
        "prefill",
        "scoring",
        "compacting",
    }


def test_builds_run_in_order_and_one_that_fails_is_told_and_ends_alone(
    scheduler: Scheduler,
) -> None:
    order: list[str] = []
    results = [
        Building.submitted(scheduler, _steps(order, "first", lambda: None)),
        Building.submitted(scheduler, _steps(order, "second", _fail)),
        Building.submitted(scheduler, _steps(order, "third", lambda: None)),
    ]
    outcomes = [building.wait() for building in results]
    kinds = [type(error).__name__ for _, error in outcomes]
    assert kinds == ["NotImplementedError", "KeyError", "NotImplementedError"]
    assert order == ["first", "first", "second", "third", "third"]
    assert scheduler.stats() == IDLE


def test_a_cancelled_build_is_closed_and_the_next_one_runs(scheduler: Scheduler) -> None:
    closed: list[str] = []
    begun = threading.Event()
    building = Building.submitted(scheduler, _endless(closed, begun))
    after = Building.submitted(scheduler, _steps([], "after", lambda: None))
    assert begun.wait(PATIENCE_SECONDS)
    building.task.cancelled.set()
    assert building.wait() == (None, None)
    assert closed == ["closed"]
    after.wait()
    assert scheduler.stats() == IDLE


def test_counts_and_tails_are_gone_after_queries_half_of_which_were_cancelled(
    model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    rng = random.Random(9)
    tasks = []
    for n in range(60):
        view = contexts[rng.randrange(3)].context.view(rng.choice(RATIOS))
        length = rng.randint(1, 6)
        asked = sequence(model, view, words(rng.choice((1, 20, 270)), n), SequenceOptions(length))
        tasks.append(submit(scheduler, asked))
        if n % 2:
            rng.choice(tasks)[0].cancelled.set()
    for task, listener in tasks:
        if not task.cancelled.is_set():
            assert listener.wait().error is None
    settle(scheduler, model, contexts[0].context.view(0.1))
    assert scheduler.stats() == IDLE
    assert all(listener.times_ended <= 1 for _, listener in tasks)
    tails = [weakref.ref(task.sequence.tail) for task, _ in tasks]
    del tasks, asked, task, listener
    gc.collect()
    assert not any(tail() for tail in tails), "the engine keeps a tail"


def _endless(
    closed: list[str], begun: threading.Event | None = None
) -> Generator[Progress, None, BuiltCache]:
    if begun is not None:
        begun.set()
    try:
        while True:
            yield Progress("prefill", 0.5)
    finally:
        closed.append("closed")


def _steps(
    order: list[str], name: str, then: Callable[[], None]
) -> Generator[Progress, None, BuiltCache]:
    order.append(name)
    yield Progress("prefill", 0.5)
    then()
    order.append(name)
    raise NotImplementedError("a real one would return a cache now")


def _fail() -> None:
    raise KeyError("broken")
