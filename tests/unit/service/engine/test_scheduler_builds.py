"""Builds beside queries on one engine: neither changes the other, and each is told its end."""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import pytest
import torch

from kvkeep_service.engine import scheduler as scheduler_module
from kvkeep_service.engine.build import BuiltCache, Progress, build
from kvkeep_service.engine.builds import BuildTask
from kvkeep_service.engine.decode import SequenceOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import Scheduler, SchedulerStats
from kvkeep_service.errors import WorkerUnavailable

from .gated import (
    IDLE,
    PATIENCE_SECONDS,
    RATIOS,
    GatedModel,
    answer_alone,
    policy,
    sequence,
    submit,
)
from .models import random_document, run_build


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


def test_stopping_tells_everybody_who_waits_and_refuses_the_rest(
    model: GatedModel, contexts: list[BuiltCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_RUNNING", 1)
    scheduler = Scheduler(model, max_waiting=9)
    with pytest.raises(WorkerUnavailable):
        submit(scheduler, sequence(model, contexts[0].context.view(0.1), [1], SequenceOptions(1)))
    scheduler.start()
    view = contexts[0].context.view(0.1)
    closed: list[str] = []
    begun = threading.Event()
    builds = [Building.submitted(scheduler, _endless(closed, begun)) for _ in range(2)]
    assert begun.wait(PATIENCE_SECONDS)
    model.hold_after(2)
    listeners = [
        submit(scheduler, sequence(model, view, [n], SequenceOptions(100)))[1] for n in range(3)
    ]
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
        "checking",
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
    assert kinds == ["Ended", "KeyError", "Ended"]
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


class Ended(Exception):
    """Where a real build returns its cache, a scripted one raises this."""


def _steps(
    order: list[str], name: str, then: Callable[[], None]
) -> Generator[Progress, None, BuiltCache]:
    order.append(name)
    yield Progress("prefill", 0.5)
    then()
    order.append(name)
    raise Ended


def _fail() -> None:
    raise KeyError("broken")
