"""Clients of one engine: in a closed loop, or arriving at random, with their tokens' times."""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from kvkeep_service.engine.answering import QueryTask
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence as Asked
from kvkeep_service.engine.decode import SequenceOptions
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.errors import Overloaded

_PATIENCE_SECONDS = 120


@dataclass
class Answers:
    """What a load measured; milliseconds. ``refused`` counts answers of 503."""

    first_token_ms: list[float] = field(default_factory=list)
    inter_token_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    refused: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together, over the whole run."""
        return self.tokens / self.seconds

    @staticmethod
    def percentile(values: Sequence[float], percent: int) -> float:
        """The value that ``percent`` of 100 values do not exceed; nan without values."""
        if len(values) < 2:
            return values[0] if values else float("nan")
        return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class _Timed(Asked):
    """A sequence that notes when each token was picked."""

    submitted_at: float
    token_times: list[float]

    def accept(self, logits: Tensor) -> str:
        """As ``Sequence.accept``."""
        text = super().accept(logits)
        self.token_times.append(time.perf_counter())
        return text


class _Listener:
    """Hears the end of one answer."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self.error: BaseException | None = None

    def on_text(self, text: str) -> None:
        """Nothing to do: tokens are timed where they are picked."""

    def on_finished(self, error: BaseException | None) -> None:
        """As ``QueryListener.on_finished``."""
        self.error = error
        self._on_end()


class Load:
    """Asks questions of random tokens of one engine, on contexts in turn."""

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        contexts: Sequence[ContextView],
        *,
        question_tokens: int,
        answer_tokens: int,
    ) -> None:
        """``contexts``: question n is asked of the n-th, from the start again after the last."""
        self._loaded = loaded
        self._scheduler = scheduler
        self._contexts = contexts
        self._question_tokens = question_tokens
        self._answer_tokens = answer_tokens
        self._asked: list[_Timed] = []
        self._random = random.Random(7)

    def closed(self, clients: int, seconds: float) -> Answers:
        """So many clients, each asking again as soon as it is answered."""
        self._asked.clear()
        started = time.perf_counter()

        def ask_again() -> None:
            while time.perf_counter() - started < seconds:
                self._ask_and_wait()

        threads = [threading.Thread(target=ask_again) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._measured(time.perf_counter() - started)

    def together(self, clients: int) -> Answers:
        """So many questions at once, each asked once."""
        self._asked.clear()
        ended = threading.Semaphore(0)
        started = time.perf_counter()
        for _ in range(clients):
            self._submit(_Listener(ended.release))
        for _ in range(clients):
            ended.acquire(timeout=_PATIENCE_SECONDS)
        return self._measured(time.perf_counter() - started)

    def open(self, per_second: float, seconds: float) -> Answers:
        """Questions that arrive at random (Poisson), however many wait already."""
        self._asked.clear()
        ended = threading.Semaphore(0)
        refused, accepted = 0, 0
        started = due = time.perf_counter()
        while (due := due + self._random.expovariate(per_second)) < started + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                self._submit(_Listener(ended.release))
                accepted += 1
            except Overloaded:
                refused += 1
        for _ in range(accepted):
            ended.acquire(timeout=_PATIENCE_SECONDS)
        measured = self._measured(time.perf_counter() - started)
        measured.refused = refused
        return measured

    def _ask_and_wait(self) -> None:
        ended = threading.Event()
        listener = _Listener(ended.set)
        with suppress(Overloaded):
            self._submit(listener)
            ended.wait(_PATIENCE_SECONDS)
        if listener.error is not None:
            raise listener.error

    def _submit(self, listener: _Listener) -> None:
        asked = _Timed(
            self._loaded.language_model,
            self._contexts[len(self._asked) % len(self._contexts)],
            [self._random.randrange(100, 20_000) for _ in range(self._question_tokens)],
            SequenceOptions(self._answer_tokens),
            tokenizer=self._loaded.tokenizer,
            stop_ids=frozenset(),
        )
        asked.token_times = []
        self._asked.append(asked)
        asked.submitted_at = time.perf_counter()
        self._scheduler.submit_query(QueryTask(asked, listener))

    def _measured(self, seconds: float) -> Answers:
        answers = Answers(seconds=seconds)
        for asked in self._asked:
            times = asked.token_times
            if times:
                answers.first_token_ms.append(1000 * (times[0] - asked.submitted_at))
            pairs = itertools.pairwise(times)
            answers.inter_token_ms += [1000 * (after - before) for before, after in pairs]
            answers.tokens += len(times)
        return answers
