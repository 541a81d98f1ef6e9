"""Builds of random documents on an engine, one after the other, and how fast they go."""

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
import torch

from kvkeep_service.engine.build import BuiltCache, Progress, build
from kvkeep_service.engine.builds import BuildTask
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.policies.kvzip import KVzip

_PATIENCE_SECONDS = 60


@dataclass
class Course:
    """When builds had come how far: whole ones, and the fraction of the one that runs."""

    times: list[float] = field(default_factory=list)
    builds: list[float] = field(default_factory=list)

    def note(self, builds: float) -> None:
        """So far have they come now."""
        self.times.append(time.perf_counter())
        self.builds.append(builds)

    def share_between(self, began: float, ended: float, alone: "Course") -> float:
        """Of the work that ``alone`` did in as much time, what was done between two times."""
        reached = np.interp([began, ended], self.times, self.builds)
        first, last = (alone.seconds_for(builds) for builds in reached)
        return (last - first) / (ended - began)

    @property
    def seconds_for_one(self) -> float:
        """Of the first whole build."""
        return self._when(1.0) - self.times[0]

    def seconds_for(self, builds: float) -> float:
        """Seconds for so many builds that all go like the first one. Fractions are no seconds."""
        whole = int(builds)
        return whole * self.seconds_for_one + self._when(builds - whole) - self.times[0]

    def _when(self, builds: float) -> float:
        return float(np.interp(builds, self.builds, self.times))


class Building:
    """Keeps an engine building, from one document to the next, but for pauses.

    ``course`` is noted on the engine's thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: LanguageModel,
        policy: KVzip,
        tokens: int,
        ratio: float,
    ) -> None:
        """Paused at first. ``tokens`` of each document, whose cache is cut at ``ratio``."""
        self._model = model
        self._scheduler = scheduler
        self._policy = policy
        self._tokens = tokens
        self._ratio = ratio
        self.course = Course()
        self._done = 0
        self._fraction = 0.0
        self._steps = self._next_document()
        self._task: BuildTask | None = None
        self._paused = threading.Event()
        self._has_built = threading.Event()
        """Or has failed."""
        self._error: BaseException | None = None

    def go_on(self) -> None:
        """Build from where the last pause began."""
        self._paused.clear()
        self._submit()

    def pause(self) -> None:
        """Let the engine have nothing to build, after its present work item."""
        assert self._task is not None, "it has begun"
        self._task.cancelled.set()
        if not self._paused.wait(_PATIENCE_SECONDS):
            raise TimeoutError(f"a build has not paused in {_PATIENCE_SECONDS} s")
        if self._error is not None:
            raise self._error

    def one_alone(self) -> Course:
        """The course of one whole build with nothing beside it."""
        self.go_on()
        self._has_built.wait()
        self.pause()
        return self.course

    def _next_document(self) -> Generator[Progress, None, BuiltCache]:
        generator = torch.Generator().manual_seed(self._done)
        ids = torch.randint(100, 20_000, (self._tokens,), generator=generator).tolist()
        document = DocumentTokens(ids[:20], ids[20:], torch.zeros(len(ids) - 20, dtype=torch.bool))
        return build(self._model, document, policy=self._policy, ratios=(self._ratio,))

    def _submit(self) -> None:
        self.course.note(self._done + self._fraction)
        self._task = BuildTask(_borrowed(self._steps), self._on_progress, self._on_finished)
        self._scheduler.submit_build(self._task)

    def _on_progress(self, progress: Progress) -> None:
        self._fraction = progress.fraction
        self.course.note(self._done + self._fraction)

    def _on_finished(self, built: BuiltCache | None, error: BaseException | None) -> None:
        self._error = error
        if built is not None or error is not None:
            self._has_built.set()
        if built is None:
            self._paused.set()
            return
        self._done, self._fraction = self._done + 1, 0.0
        self._steps = self._next_document()
        was_cancelled = self._task is not None and self._task.cancelled.is_set()
        if was_cancelled:
            self._paused.set()
        else:
            self._submit()


def _borrowed(
    steps: Generator[Progress, None, BuiltCache],
) -> Generator[Progress, None, BuiltCache]:
    """The same steps; closing this does not close them."""
    while True:
        try:
            progress = next(steps)
        except StopIteration as finished:
            built: BuiltCache = finished.value
            return built
        yield progress
