"""Clients of one engine: in a closed loop, or arriving at random, with their tokens' times."""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvkeep_service.engine.answering import QueryTask
from kvkeep_service.engine.cache import ContextView
from kvkeep_service.engine.decode import Sequence as Asked
from kvkeep_service.engine.decode import SequenceOptions
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.engine.transfer import Found
from kvkeep_service.errors import Overloaded

_PATIENCE_SECONDS = 120
_LOOK_SECONDS = 0.05


@dataclass
class Answers:
    """What a load measured, from ``began`` to ``ended``; milliseconds.

    ``refused`` counts answers of 503.
    """

    began: float
    ended: float
    first_token_ms: list[float] = field(default_factory=list)
    inter_token_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0

    @classmethod
    def joined(cls, pieces: Sequence["Answers"]) -> "Answers":
        """Pieces of one load, as if one had followed the other."""
        whole = cls(0.0, sum(piece.ended - piece.began for piece in pieces))
        for piece in pieces:
            whole.first_token_ms += piece.first_token_ms
            whole.inter_token_ms += piece.inter_token_ms
            whole.tokens += piece.tokens
            whole.refused += piece.refused
        return whole

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together."""
        return self.tokens / (self.ended - self.began)

    def add(self, asked_at: float, token_times: Sequence[float]) -> None:
        """Count what of one answer lies between ``began`` and ``ended``."""
        times = [at for at in token_times if self.began <= at <= self.ended]
        if times and asked_at >= self.began:
            self.first_token_ms.append(1000 * (times[0] - asked_at))
        pairs = itertools.pairwise(times)
        self.inter_token_ms += [1000 * (after - before) for before, after in pairs]
        self.tokens += len(times)

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

    def accept(self, next_token: Found) -> str:
        """As ``Sequence.accept``."""
        text = super().accept(next_token)
        self.token_times.append(time.perf_counter())
        return text


class _Listener:
    """Hears the end of one answer."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raises: what the answer ended with, if that was no answer."""
        if self.error is not None:
            raise self.error

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
        """So many clients, each asking again as soon as it is answered.

        Counted is from when all of them have had a token. Their first answers end at random, as
        of clients that have asked for long: together from the start, they would be in step, and
        nobody would wait for the questions of others.
        """
        self._asked.clear()
        is_over = threading.Event()
        firsts = [self._random.randint(1, self._answer_tokens) for _ in range(clients)]

        errors: list[BaseException] = []

        def ask_again(answer_tokens: int) -> None:
            try:
                while not is_over.is_set():
                    self._ask_and_wait(answer_tokens, is_over)
                    answer_tokens = self._answer_tokens
            # One client less would be another load: whatever it was ends all.
            except BaseException as error:  # noqa: BLE001
                errors.append(error)
                is_over.set()

        threads = [threading.Thread(target=ask_again, args=(first,)) for first in firsts]
        for thread in threads:
            thread.start()
        try:
            while sum(bool(asked.token_times) for asked in list(self._asked)) < clients:
                if is_over.wait(0.005):
                    break
            began = time.perf_counter()
            is_over.wait(seconds)
            ended = time.perf_counter()
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return self._measured(began, ended)

    def together(self, clients: int) -> Answers:
        """So many questions at once, each asked once."""
        self._asked.clear()
        ended = threading.Semaphore(0)
        started = time.perf_counter()
        listeners = [_Listener(ended.release) for _ in range(clients)]
        for listener in listeners:
            self._submit(listener)
        _wait_for(listeners, ended)
        return self._measured(started, time.perf_counter())

    def open(self, per_second: float, seconds: float) -> Answers:
        """Questions that arrive at random (Poisson), however many wait already."""
        self._asked.clear()
        ended = threading.Semaphore(0)
        refused, listeners = 0, list[_Listener]()
        started = due = time.perf_counter()
        while (due := due + self._random.expovariate(per_second)) < started + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                listener = _Listener(ended.release)
                self._submit(listener)
                listeners.append(listener)
            except Overloaded:
                refused += 1
        _wait_for(listeners, ended)
        measured = self._measured(started, time.perf_counter())
        measured.refused = refused
        return measured

    def _ask_and_wait(self, answer_tokens: int, is_over: threading.Event) -> None:
        ended = threading.Event()
        listener = _Listener(ended.set)
        task = self._submit(listener, answer_tokens)
        while not (ended.wait(_LOOK_SECONDS) or is_over.is_set()):
            pass
        task.cancelled.set()
        listener.check()

    def _submit(self, listener: _Listener, answer_tokens: int | None = None) -> QueryTask:
        asked = _Timed(
            self._loaded.language_model,
            self._contexts[len(self._asked) % len(self._contexts)],
            [self._random.randrange(100, 20_000) for _ in range(self._question_tokens)],
            SequenceOptions(answer_tokens or self._answer_tokens),
            tokenizer=self._loaded.tokenizer,
            stop_ids=frozenset(),
        )
        asked.token_times = []
        self._asked.append(asked)
        asked.submitted_at = time.perf_counter()
        task = QueryTask(asked, listener)
        self._scheduler.submit_query(task)
        return task

    def _measured(self, began: float, ended: float) -> Answers:
        answers = Answers(began, ended)
        for asked in self._asked:
            answers.add(asked.submitted_at, asked.token_times)
        return answers


def _wait_for(listeners: Sequence[_Listener], ended: threading.Semaphore) -> None:
    """Return once all answers have ended, as many as ``ended`` is released for.

    Raises: TimeoutError; what one of them ended with. A figure without it would be of less work.
    """
    for _ in listeners:
        if not ended.acquire(timeout=_PATIENCE_SECONDS):
            raise TimeoutError(f"an answer has not ended in {_PATIENCE_SECONDS} s")
    for listener in listeners:
        listener.check()
