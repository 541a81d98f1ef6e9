"""The queries that run: their questions read, a token at a time for all, each told its own.

Belongs to the engine's thread.
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvkeep_service.engine.arrival import NotYet
from kvkeep_service.engine.decode import (
    Sequence,
    decode_step,
    kept_between_steps,
    prefill_questions,
)
from kvkeep_service.engine.graphs import DeviceSteps, GraphOptions
from kvkeep_service.engine.memory import attempt, give_back, is_out_of_memory
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine_counts import StepCounts
from kvkeep_service.errors import MemoryShort

ROUND_TOKENS = 256
"""Question tokens that one round reads: bounds how long a running answer waits for new ones."""

_CALM_STEPS = 200
"""Decoding steps without trouble after which a batch may be twice as large again."""

Outcome: TypeAlias = str | Exception | None
Forward: TypeAlias = Callable[[LanguageModel, Several[Sequence]], Several[Outcome]]


class QueryListener(Protocol):
    """Who is told of a query's tokens, on the engine's thread: returns at once, never raises."""

    def on_text(self, text: str) -> None:
        """New text, never empty."""
        ...

    def on_finished(self, error: BaseException | None) -> None:
        """The sequence ended by itself (None), or with an error; called once, unless cancelled."""
        ...


@dataclass(slots=True, eq=False)
class QueryTask:
    """One query in the engine. Setting ``cancelled`` ends it within one token."""

    sequence: Sequence
    listener: QueryListener
    tenant: str = ""
    cancelled: threading.Event = field(default_factory=threading.Event)
    submitted_at: float = field(default_factory=time.monotonic)


class Answering:
    """Reads, decodes and hands out; a forward that fails is tried again with fewer queries."""

    def __init__(
        self, model: LanguageModel, on_memory_short: Callable[[], None], graphs: GraphOptions
    ) -> None:
        """``on_memory_short`` is called on the engine's thread and returns at once."""
        self._model = model
        self._on_memory_short = on_memory_short
        self._tails = kept_between_steps(model, graphs)
        self.running: list[QueryTask] = []
        self._most_together: int | None = None
        self._calm_steps = 0
        self.num_out_of_memory = 0
        self.num_shed = 0

    @property
    def steps(self) -> StepCounts:
        """How steps ran on a GPU; nothing is counted elsewhere."""
        kept = self._tails
        return kept.counts if isinstance(kept, DeviceSteps) else StepCounts()

    def drop_cancelled(self) -> None:
        """Forget those whose askers have gone."""
        self.running = [task for task in self.running if not task.cancelled.is_set()]

    def read(self) -> bool:
        """Read slices of the oldest questions that need not wait; False when there are none."""
        unread = [t for t in self.running if not t.sequence.is_prefilled]
        ready = [t for t in unread if not t.sequence.has_to_wait]
        if ready:
            self._run(_fitting(ready), prefill_questions)
        return bool(ready)

    def read_arriving(self, task: QueryTask) -> None:
        """Read a question as far as its context comes, or until that is interrupted."""
        self._run([task], prefill_questions)

    def decode(self) -> bool:
        """One token for every query whose question is read; False when there are none."""
        ready = [task for task in self.running if task.sequence.is_prefilled]
        if not ready:
            self._tails.clear()
            return False
        together = self._most_together or len(ready)
        for first in range(0, len(ready), together):
            self._run(ready[first : first + together], self._decode_step)
        self._calm_steps += 1
        if self._most_together is not None and self._calm_steps >= _CALM_STEPS:
            self._calm_steps = 0
            grown = 2 * self._most_together
            self._most_together = None if grown >= len(ready) else grown
        if not self.running:
            self._tails.clear()
        return True

    def _decode_step(
        self, model: LanguageModel, sequences: Several[Sequence]
    ) -> list[str | Exception]:
        return decode_step(model, sequences, self._tails)

    def end_all(self, error: BaseException) -> None:
        """Tell all that no more will come."""
        while self.running:
            self._finish(self.running[0], error)

    def _run(self, tasks: list[QueryTask], forward: Forward) -> None:
        """One forward for all of them, or several where one fails: the guilty one fails alone."""
        outcomes = self._attempt(tasks, forward)
        if not isinstance(outcomes, Exception):
            for task, outcome in zip(tasks, outcomes, strict=True):
                self._hand_out(task, outcome)
        elif len(tasks) > 1:
            if is_out_of_memory(outcomes):
                self._most_together = len(tasks) // 2
            middle = len(tasks) // 2
            self._run(tasks[:middle], forward)
            self._run(tasks[middle:], forward)
        elif not isinstance(outcomes, NotYet):
            self._finish(tasks[0], outcomes)

    def _attempt(self, tasks: list[QueryTask], forward: Forward) -> Several[Outcome] | Exception:
        """A forward, and once more for a lone query that had no memory. Never raises."""
        sequences = [task.sequence for task in tasks]
        outcomes = attempt(lambda: forward(self._model, sequences))
        if not (isinstance(outcomes, Exception) and is_out_of_memory(outcomes)):
            return outcomes
        self.num_out_of_memory += 1
        self._calm_steps = 0
        self._tails.clear()
        give_back(self._model.device)
        self._on_memory_short()
        if len(tasks) > 1:
            return outcomes
        outcomes = attempt(lambda: forward(self._model, sequences))
        if not (isinstance(outcomes, Exception) and is_out_of_memory(outcomes)):
            return outcomes
        self.num_shed += 1
        return MemoryShort("there was no memory for this answer")

    def _hand_out(self, task: QueryTask, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            self._finish(task, outcome)
            return
        if outcome:
            task.listener.on_text(outcome)
        if task.sequence.finish_reason is not None:
            self._finish(task, None)

    def _finish(self, task: QueryTask, error: BaseException | None) -> None:
        self.running.remove(task)
        task.listener.on_finished(error)


def _fitting(tasks: list[QueryTask]) -> list[QueryTask]:
    """The first of them, and those after it while their slices fit one round."""
    left = ROUND_TOKENS - len(tasks[0].sequence.next_slice)
    fitting = tasks[:1]
    for task in tasks[1:]:
        left -= len(task.sequence.next_slice)
        if left < 0:
            break
        fitting.append(task)
    return fitting
