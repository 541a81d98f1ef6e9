"""A build beside answers: how often it makes way, and that nothing of it changes by that.

Who waits is in order too: tenants take turns, and what comes together is read together.
"""

from collections.abc import Generator, Iterator

import pytest
import torch

from kvkeep_service.engine.build import BuiltCache, Progress, build
from kvkeep_service.engine.decode import SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.errors import Overloaded
from kvkeep_service.policies.kvzip import KVzip
from kvkeep_service.ports import Normalization, Scoring

from .gated import (
    IDLE,
    PATIENCE_SECONDS,
    PROMPTS,
    RATIOS,
    GatedModel,
    Listener,
    QueryTask,
    answer_alone,
    sequence,
    submit,
)
from .models import random_document, run_build
from .test_scheduler_builds import Building, Ended


@pytest.fixture
def eager(model: GatedModel) -> Iterator[Scheduler]:
    """An engine in which a build has hardly any time of its own beside answers."""
    started = Scheduler(model, max_waiting=3, build_slice_seconds=1e-9)
    started.start()
    yield started
    model.release()
    assert started.stop(PATIENCE_SECONDS)


@pytest.mark.parametrize("scoring", ["local", "exact"])
@pytest.mark.parametrize("normalization", ["none", "kvzip_plus"])
def test_a_build_between_the_tokens_of_answers_gives_the_same_cache_bit_for_bit(
    plain: LanguageModel,
    model: GatedModel,
    scheduler: Scheduler,
    contexts: list[BuiltCache],
    scoring: Scoring,
    normalization: Normalization,
) -> None:
    def policy() -> KVzip:
        return KVzip(PROMPTS, scoring=scoring, chunk_tokens=128, normalization=normalization)

    document = random_document(300, seed=31)
    reference = run_build(plain, document, policy(), RATIOS)
    views = [built.context.view(0.3) for built in contexts]
    options = SequenceOptions(40)
    alone = [answer_alone(plain, sequence(plain, view, [3, 4], options)) for view in views]
    model.hold_after(0)
    asked = [submit(scheduler, sequence(model, view, [3, 4], options)) for view in views]
    building = Building.submitted(scheduler, build(model, document, policy=policy(), ratios=RATIOS))
    model.release()
    built, error = building.wait()
    assert error is None
    assert built is not None
    for _, listener in asked:
        assert listener.wait().error is None
    assert [task.sequence.generated for task, _ in asked] == alone
    for ours, theirs in zip(built.context.layers, reference.context.layers, strict=True):
        assert torch.equal(ours.k, theirs.k)
        assert torch.equal(ours.v, theirs.v)
        assert torch.equal(ours.length, theirs.length)
    assert scheduler.counts().build_seconds > 0
    assert scheduler.stats() == IDLE


def test_answers_come_first_and_a_build_takes_no_more_than_its_share(
    model: GatedModel, eager: Scheduler, contexts: list[BuiltCache]
) -> None:
    view = contexts[0].context.view(0.1)
    done_at: list[int] = []

    def steps() -> Generator[Progress, None, BuiltCache]:
        for _ in range(3):
            done_at.append(len(model.batches))
            yield Progress("prefill", 0.5)
        raise Ended

    model.hold_after(0)
    _, listener = submit(eager, sequence(model, view, [1], SequenceOptions(30)))
    building = Building.submitted(eager, steps())
    model.release()
    building.wait()
    assert listener.wait().error is None
    # Behind the question and its first token; what that item took, 30 tokens do not pay for.
    assert done_at == [2, 30, 30]


def test_a_build_has_the_whole_of_a_large_slice_at_once(
    model: GatedModel, contexts: list[BuiltCache]
) -> None:
    scheduler = Scheduler(model, max_waiting=3, build_slice_seconds=3600)
    scheduler.start()
    view = contexts[0].context.view(0.1)
    done_at: list[int] = []

    def steps() -> Generator[Progress, None, BuiltCache]:
        for _ in range(50):
            done_at.append(len(model.batches))
            yield Progress("prefill", 0.5)
        raise Ended

    model.hold_after(0)
    _, listener = submit(scheduler, sequence(model, view, [1], SequenceOptions(5)))
    building = Building.submitted(scheduler, steps())
    model.release()
    building.wait()
    assert listener.wait().error is None
    assert done_at == [2] * 50
    assert scheduler.stop(PATIENCE_SECONDS)


def test_questions_that_wait_are_read_in_turns_of_their_tenants(
    model: GatedModel,
    eager: Scheduler,
    contexts: list[BuiltCache],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvkeep_service.engine.scheduler.MAX_RUNNING", 1)
    view = contexts[0].context.view(0.1)
    ended: list[str] = []

    def ask(name: str, tenant: str) -> Listener:
        class Named(Listener):
            def on_finished(self, error: BaseException | None) -> None:
                if error is None:
                    ended.append(name)
                super().on_finished(error)

        listener = Named()
        eager.submit_query(
            QueryTask(sequence(model, view, [1], SequenceOptions(2)), listener, tenant)
        )
        return listener

    model.hold_after(0)
    first = ask("running", "many")
    model.wait_until_held()
    many = [ask(f"many {n}", "many") for n in range(3)]
    # The queue is full: whoever has more waiting gives up the newest for who has less.
    few = ask("few 0", "few")
    assert isinstance(many[2].wait().error, Overloaded)
    with pytest.raises(Overloaded) as refused:
        ask("many 3", "many")
    assert refused.value.retry_after_seconds >= 1
    model.release()
    for listener in (first, many[0], many[1], few):
        assert listener.wait().error is None
    assert ended == ["running", "many 0", "few 0", "many 1"]
    assert eager.stats() == IDLE


def test_questions_that_come_together_are_read_in_one_forward_as_far_as_a_round_goes(
    plain: LanguageModel, model: GatedModel, scheduler: Scheduler, contexts: list[BuiltCache]
) -> None:
    views = [built.context.view(0.6) for built in contexts]
    lengths = (10, 200, 100, 300, 5)
    questions = [(views[n % 3], list(range(1, 1 + m))) for n, m in enumerate(lengths)]
    questions = [(view, [token % 290 for token in ids]) for view, ids in questions]
    options = SequenceOptions(6)
    alone = [answer_alone(plain, sequence(plain, v, ids, options)) for v, ids in questions]
    model.hold_after(0)
    # Held in a forward of one that is already running, so that the others come together.
    _, running = submit(scheduler, sequence(model, views[0], [1], SequenceOptions(30)))
    model.wait_until_held()
    asked = [submit(scheduler, sequence(model, v, ids, options)) for v, ids in questions]
    before = len(model.batches)
    model.release()
    for _, listener in [*asked, (None, running)]:
        assert listener.wait().error is None
    assert [task.sequence.generated for task, _ in asked] == alone
    # 10 + 200, then 100, then 256 of 300, then 44 + 5: four forwards read five questions.
    reading = [n for n in model.tokens[before:] if n[0] == 1 and n[1] > 1]
    assert reading == [(1, 210), (1, 100), (1, 256), (1, 49)]
