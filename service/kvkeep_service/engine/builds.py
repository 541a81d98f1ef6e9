"""Builds in the engine: one at a time, a work item whenever answers leave time for it."""

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from kvkeep_service.engine.build import BuiltCache, Progress
from kvkeep_service.engine.memory import attempt


@dataclass(slots=True, eq=False)
class BuildTask:
    """One build in the engine; the callbacks run on its thread. ``cancelled`` abandons it."""

    steps: Generator[Progress, None, BuiltCache]
    on_progress: Callable[[Progress], None]
    on_finished: Callable[[BuiltCache | None, BaseException | None], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


class Builds:
    """Waiting builds, and the one that runs. Only ``submit`` and ``len`` for other threads."""

    def __init__(self) -> None:
        """Start empty."""
        self._tasks: deque[BuildTask] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, task: BuildTask) -> None:
        """Let a build wait for those before it."""
        self._tasks.append(task)

    def advance(self) -> None:
        """Do one work item of the oldest build; tell its owner what came of it."""
        task = self._tasks[0]
        if task.cancelled.is_set():
            self._end(task, None, None)
            return
        outcome = attempt(lambda: _item(task.steps))
        if isinstance(outcome, Progress):
            task.on_progress(outcome)
        elif isinstance(outcome, BuiltCache):
            self._end(task, outcome, None)
        else:
            self._end(task, None, outcome)

    def abandon_all(self, error: BaseException) -> None:
        """Tell everybody who still waits that no build will be done."""
        while self._tasks:
            self._end(self._tasks[0], None, error)

    def _end(self, task: BuildTask, built: BuiltCache | None, error: BaseException | None) -> None:
        self._tasks.popleft()
        # What it holds is free before anybody hears of its end.
        task.steps.close()
        task.on_finished(built, error)


def _item(steps: Generator[Progress, None, BuiltCache]) -> Progress | BuiltCache:
    try:
        return next(steps)
    except StopIteration as finished:
        built: BuiltCache = finished.value
        return built
