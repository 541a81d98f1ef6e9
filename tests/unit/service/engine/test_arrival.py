"""Questions on layers that are still arriving: read when the engine is idle, never in the way."""

import threading
from dataclasses import replace

import pytest
import torch

from kvkeep_kernels.layout import RaggedKV
from kvkeep_service.engine.arrival import LayerArrival, NotYet
from kvkeep_service.engine.build import BuiltCache, build
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence, SequenceOptions
from kvkeep_service.engine.scheduler import BuildTask, Scheduler
from kvkeep_service.errors import WorkerUnavailable

from .gated import IDLE, PATIENCE_SECONDS, GatedModel, answer_alone, policy, sequence, submit
from .models import random_document

LAYERS = 3
QUESTION = [7, 8, 9, 10]
OPTIONS = SequenceOptions(6)


class Arriving:
    """A context whose buffers hold NaN until a layer arrives."""

    def __init__(self, built: BuiltCache) -> None:
        self._whole = built.context.view(0.3)
        self.arrival = LayerArrival(LAYERS)
        empty = tuple(_poisoned(rows) for rows in self._whole.layers)
        self.view: ContextView = replace(self._whole, layers=empty, arrival=self.arrival)

    def arrive(self, layer: int) -> None:
        here, there = self.view.layers[layer], self._whole.layers[layer]
        here.k.copy_(there.k)
        here.v.copy_(there.v)
        self.arrival.arrived(layer)


def _poisoned(rows: RaggedKV) -> RaggedKV:
    empty = torch.full_like(rows.k, torch.nan)
    return RaggedKV(empty, empty.clone(), rows.start, rows.length)


@pytest.fixture
def arriving(contexts: list[BuiltCache]) -> Arriving:
    return Arriving(contexts[0])


@pytest.fixture
def asked(model: GatedModel, arriving: Arriving) -> Sequence:
    return sequence(model, arriving.view, QUESTION, OPTIONS)


def expected(model: GatedModel, built: BuiltCache, ratio: float = 0.3) -> list[int]:
    return answer_alone(model, sequence(model, built.context.view(ratio), QUESTION, OPTIONS))


def is_waiting(arrival: LayerArrival) -> bool:
    with arrival._news:
        return bool(arrival._news._waiters)  # type: ignore[attr-defined]


def until_waiting(arrival: LayerArrival) -> None:
    pause = threading.Event()
    for _ in range(PATIENCE_SECONDS * 1000):
        if is_waiting(arrival):
            return
        pause.wait(0.001)
    raise AssertionError("the engine does not wait for a layer")


def test_a_question_read_as_layers_arrive_has_the_tokens_of_a_whole_load(
    scheduler: Scheduler,
    model: GatedModel,
    contexts: list[BuiltCache],
    arriving: Arriving,
    asked: Sequence,
) -> None:
    right = expected(model, contexts[0])
    model.batches.clear()
    _, listener = submit(scheduler, asked)
    for layer in range(LAYERS):
        until_waiting(arriving.arrival)
        assert listener.pieces == []
        arriving.arrive(layer)
    assert listener.wait().error is None
    assert asked.generated == right
    # One forward read the question, and the first token came of it.
    assert len(model.batches) == OPTIONS.max_tokens


def test_a_question_that_arrives_meanwhile_goes_first(
    scheduler: Scheduler,
    model: GatedModel,
    contexts: list[BuiltCache],
    arriving: Arriving,
    asked: Sequence,
) -> None:
    _, waiting = submit(scheduler, asked)
    arriving.arrive(0)
    until_waiting(arriving.arrival)
    other = sequence(model, contexts[1].context.view(0.6), QUESTION, OPTIONS)
    _, listener = submit(scheduler, other)
    assert listener.wait().error is None
    assert not waiting.ended.is_set()
    for layer in range(1, LAYERS):
        arriving.arrive(layer)
    assert waiting.wait().error is None
    assert asked.generated == expected(model, contexts[0])
    assert other.generated == expected(model, contexts[1], 0.6)
    assert scheduler.stats() == IDLE


def test_a_question_whose_layers_are_all_there_does_not_wait_for_those_of_another(
    scheduler: Scheduler,
    model: GatedModel,
    contexts: list[BuiltCache],
    arriving: Arriving,
    asked: Sequence,
) -> None:
    _, waiting = submit(scheduler, asked)
    faster = Arriving(contexts[1])
    other = sequence(model, faster.view, QUESTION, OPTIONS)
    _, listener = submit(scheduler, other)
    until_waiting(arriving.arrival)
    for layer in range(LAYERS):
        faster.arrive(layer)
    assert listener.wait().error is None
    assert other.generated == expected(model, contexts[1])
    assert not waiting.ended.is_set()
    arriving.arrival.fail(OSError("away"))
    assert isinstance(waiting.wait().error, OSError)


def test_a_build_does_not_wait_for_layers(
    scheduler: Scheduler, model: GatedModel, arriving: Arriving, asked: Sequence
) -> None:
    _, waiting = submit(scheduler, asked)
    until_waiting(arriving.arrival)
    built = threading.Event()
    steps = build(model, random_document(260), policy=policy(), ratios=(0.3,))
    scheduler.submit_build(BuildTask(steps, lambda _: None, lambda *_: built.set()))
    assert built.wait(PATIENCE_SECONDS)
    assert not waiting.ended.is_set()
    for layer in range(LAYERS):
        arriving.arrive(layer)
    assert waiting.wait().error is None


def test_field_03_a_load_that_fails_ends_its_question_with_its_error_and_no_other(
    scheduler: Scheduler,
    model: GatedModel,
    contexts: list[BuiltCache],
    arriving: Arriving,
    asked: Sequence,
) -> None:
    _, listener = submit(scheduler, asked)
    arriving.arrive(0)
    until_waiting(arriving.arrival)
    trouble = OSError("the store is away")
    arriving.arrival.fail(trouble)
    assert listener.wait().error is trouble
    assert (listener.pieces, asked.generated) == ([], [])
    later = sequence(model, contexts[0].context.view(0.3), QUESTION, OPTIONS)
    _, heard = submit(scheduler, later)
    assert heard.wait().error is None
    assert later.generated == expected(model, contexts[0])


def test_stopping_does_not_wait_for_layers(
    model: GatedModel, arriving: Arriving, asked: Sequence
) -> None:
    scheduler = Scheduler(model, max_waiting=1)
    scheduler.start()
    _, listener = submit(scheduler, asked)
    until_waiting(arriving.arrival)
    assert scheduler.stop(PATIENCE_SECONDS)
    assert isinstance(listener.wait().error, WorkerUnavailable)


def test_a_wait_ends_with_the_layer_an_error_or_an_interruption() -> None:
    arrival = LayerArrival(2)
    arrival.arrived(0)
    arrival.wait(0)
    arrival.interrupt()
    arrival.wait(0)
    with pytest.raises(NotYet):
        arrival.wait(1)
    arrival.resume()
    assert not arrival.is_settled
    arrival.fail(KeyError("gone"))
    with pytest.raises(KeyError):
        arrival.wait(1)
    assert arrival.is_settled
    whole = LayerArrival(1)
    whole.arrived(0)
    whole.fail(KeyError("too late to matter"))
    whole.wait(0)
    assert whole.is_settled
