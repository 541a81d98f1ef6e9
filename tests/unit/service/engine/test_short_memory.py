"""Forwards without memory: fewer at once, another try, one query given up; never the engine."""

from collections.abc import Iterator

import pytest
import torch

from kvkeep_service.engine.attention import AttentionPass
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.decode import SequenceOptions
from kvkeep_service.engine.memory import is_out_of_memory
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.errors import MemoryShort

from .gated import IDLE, PATIENCE_SECONDS, GatedModel, answer_alone, sequence, submit

# As torch's allocators say it, on a CPU and on a GPU, and as Python does.
ERRORS = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: not enough memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError(),
]


class CrampedModel(GatedModel):
    """A model whose forwards find memory for so many tokens at once, and no more."""

    room: int | None = None
    shortages = 0
    error: Exception | None = None

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        found = super().hidden(token_ids, positions, attention)
        if self.room is not None and token_ids.numel() > self.room:
            self.shortages += 1
            raise ERRORS[self.shortages % len(ERRORS)]
        return found


@pytest.fixture
def cramped(plain: LanguageModel) -> CrampedModel:
    return CrampedModel(plain)


@pytest.fixture
def given_up() -> list[str]:
    return []


@pytest.fixture
def engine(cramped: CrampedModel, given_up: list[str]) -> Iterator[Scheduler]:
    started = Scheduler(
        cramped, max_waiting=100, on_memory_short=lambda: given_up.append("idle caches")
    )
    started.start()
    yield started
    cramped.release()
    assert started.stop(PATIENCE_SECONDS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_out_of_memory_is_told_from_other_errors(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("room", [1, 3])
def test_a_batch_too_large_for_memory_is_decoded_in_parts_with_the_same_answers(
    plain: LanguageModel,
    cramped: CrampedModel,
    engine: Scheduler,
    contexts: list[BuiltCache],
    given_up: list[str],
    room: int,
) -> None:
    views = [built.context.view(0.3) for built in contexts]
    options = SequenceOptions(12)
    questions = [(views[n % 3], [n + 1]) for n in range(6)]
    alone = [answer_alone(plain, sequence(plain, v, ids, options)) for v, ids in questions]
    cramped.room = room
    cramped.hold_after(0)
    asked = [submit(engine, sequence(cramped, v, ids, options)) for v, ids in questions]
    cramped.release()
    assert [listener.wait().error for _, listener in asked] == [None] * 6
    assert [task.sequence.generated for task, _ in asked] == alone
    assert engine.counts().out_of_memory == cramped.shortages == len(given_up) > 0
    # The engine remembers what is too much: it does not run into it at every step.
    assert cramped.shortages < 12
    assert engine.counts().shed == 0
    assert engine.stats() == IDLE


def test_a_query_that_finds_no_memory_alone_is_given_up_and_the_others_go_on(
    cramped: CrampedModel, engine: Scheduler, contexts: list[BuiltCache]
) -> None:
    view = contexts[0].context.view(0.1)
    cramped.room = 20
    cramped.hold_after(0)
    good = [submit(engine, sequence(cramped, view, [n], SequenceOptions(9))) for n in range(3)]
    _, large = submit(engine, sequence(cramped, view, [7] * 21, SequenceOptions(9)))
    cramped.release()
    refused = large.wait().error
    assert isinstance(refused, MemoryShort)
    assert refused.code == "overloaded"
    assert large.times_ended == 1
    assert [listener.wait().error for _, listener in good] == [None] * 3
    assert engine.counts().shed == 1
    # The engine lives, and answers what fits.
    _, after = submit(engine, sequence(cramped, view, [7] * 20, SequenceOptions(2)))
    assert after.wait().error is None
    assert engine.stats() == IDLE


def test_a_batch_grows_again_after_many_steps_without_trouble(
    cramped: CrampedModel,
    engine: Scheduler,
    contexts: list[BuiltCache],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvkeep_service.engine.answering._CALM_STEPS", 5)
    view = contexts[0].context.view(0.1)
    cramped.room = 1
    cramped.hold_after(0)
    asked = [submit(engine, sequence(cramped, view, [n], SequenceOptions(60))) for n in range(4)]
    cramped.hold_after(12)
    cramped.wait_until_held()
    cramped.room = None
    cramped.release()
    assert [listener.wait().error for _, listener in asked] == [None] * 4
    assert max(cramped.batches[-20:]) == 4
