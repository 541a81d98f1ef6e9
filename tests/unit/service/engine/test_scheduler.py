"""Many queries and builds on one engine: each as if it were alone, none harming another."""

import gc
import random
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from kvkeep_service.engine import scheduler as scheduler_module
from kvkeep_service.engine.answering import QueryTask
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.sampling import SamplingOptions
from kvkeep_service.engine.scheduler import Scheduler, SchedulerStats
from kvkeep_service.engine.transfer import Found
from kvkeep_service.errors import Overloaded

from .gated import (
    IDLE,
    PATIENCE_SECONDS,
    RATIOS,
    WORDS,
    GatedModel,
    Listener,
    answer_alone,
    sequence,
    submit,
)
from .models import VOCABULARY

# Two logits as close as this may change places when a matrix has other rows beside them.
NEAR_TIE = 1e-4
AT_ONCE = 8


def words(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


class Measured(Sequence):
    """A sequence that notes by how much each of its tokens was the best."""

    margins: list[float]

    needs_logits = True

    def accept(self, next_token: Found) -> str:
        assert next_token.logits is not None
        best, second = next_token.logits.topk(2).values.tolist()
        self.margins = [*getattr(self, "margins", []), best - second]
        return super().accept(next_token)


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
        def accept(self, next_token: Found) -> str:
            is_finite = len(self.generated) != 3
            return super().accept(replace(next_token, is_finite=is_finite))

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
    model.error = RuntimeError("broken")
    model.release()
    assert [listener.wait().error for _, listener in both] == [model.error] * 2
    model.error = None
    settle(scheduler, model, view)
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
