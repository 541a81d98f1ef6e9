"""Builds of random documents on an engine, one after the other, and how fast they go."""

import threading
import time

import torch

from kvkeep_service.engine.build import BuiltCache, DocumentTokens, Progress, build
from kvkeep_service.engine.builds import BuildTask
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.policies.kvzip import KVzip


class Building:
    """Keeps an engine building until ``stop``; rates are in document tokens a second."""

    def __init__(
        self,
        scheduler: Scheduler,
        model: LanguageModel,
        policy: KVzip,
        tokens: int,
        ratio: float,
    ) -> None:
        """Begin at once. ``tokens`` of each document, whose cache is cut at ``ratio``."""
        self._model = model
        self._scheduler = scheduler
        self._policy = policy
        self._tokens = tokens
        self._ratio = ratio
        self._done = 0
        self._fraction = 0.0
        self._is_stopping = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._started_at = time.perf_counter()
        self._begin()

    def stop(self) -> float:
        """Abandon the build that runs. Returns the document tokens built in a second."""
        rate = (
            (self._done + self._fraction) * self._tokens / (time.perf_counter() - self._started_at)
        )
        self._is_stopping = True
        self._task.cancelled.set()
        self._ended.wait(60)
        if self._error is not None:
            raise self._error
        return rate

    def wait_for_one(self) -> None:
        """Return once a whole build has ended."""
        while not self._done and self._error is None:
            time.sleep(0.01)

    def _begin(self) -> None:
        generator = torch.Generator().manual_seed(self._done)
        ids = torch.randint(100, 20_000, (self._tokens,), generator=generator).tolist()
        document = DocumentTokens(ids[:20], ids[20:], torch.zeros(len(ids) - 20, dtype=torch.bool))
        steps = build(self._model, document, policy=self._policy, ratios=(self._ratio,))
        self._task = BuildTask(steps, self._on_progress, self._on_finished)
        self._scheduler.submit_build(self._task)

    def _on_progress(self, progress: Progress) -> None:
        self._fraction = progress.fraction

    def _on_finished(self, built: BuiltCache | None, error: BaseException | None) -> None:
        self._error = error
        if built is None or self._is_stopping:
            self._ended.set()
            return
        self._done, self._fraction = self._done + 1, 0.0
        self._begin()
