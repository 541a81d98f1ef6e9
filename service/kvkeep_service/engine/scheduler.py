"""The engine's thread: every forward of the model happens here, one after the other.

A round of the loop reads one slice of one new question, gives every running query one token,
and does one work item of one build. So questions join and leave at any token, and a build never
holds an answer up for longer than one of its slices.

A question whose context is still being loaded is read layer by layer as they arrive, but only
while nothing else is to be done: whatever is submitted meanwhile makes the engine give that up,
and begin it again later.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvkeep_service.engine.arrival import LayerArrival, NotYet
from kvkeep_service.engine.build import BuiltCache, Progress
from kvkeep_service.engine.decode import Sequence, decode_step, prefill_question
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.errors import Overloaded, WorkerUnavailable

MAX_RUNNING = 32
"""Sequences decoded together; more wait."""


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
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class BuildTask:
    """One build in the engine; the callbacks run on its thread. ``cancelled`` abandons it."""

    steps: Generator[Progress, None, BuiltCache]
    on_progress: Callable[[Progress], None]
    on_finished: Callable[[BuiltCache | None, BaseException | None], None]
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """How much is in the engine now."""

    running: int
    waiting: int
    builds: int
    is_alive: bool


class Scheduler:
    """Continuous batching over queries of any contexts, with builds in between.

    ``submit_*`` and ``stats`` may be called from any thread.
    """

    def __init__(
        self, model: LanguageModel, *, max_waiting: int, threads: int | None = None
    ) -> None:
        """``max_waiting`` queries may wait; ``threads`` is for torch on a CPU, None its choice."""
        self._model = model
        self._max_waiting = max_waiting
        self._threads = threads
        self._wake = threading.Condition()
        self._waiting: deque[QueryTask] = deque()
        self._builds: deque[BuildTask] = deque()
        self._running: list[QueryTask] = []
        self._is_stopping = False
        # What the engine is waiting for, or about to, because there is nothing else to do.
        self._awaited: LayerArrival | None = None
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread; once."""
        self._thread.start()

    def stop(self, deadline_seconds: float) -> bool:
        """End the thread after its present work item; False when it is still busy then.

        Queries and builds that have not ended are told so.
        """
        with self._wake:
            self._is_stopping = True
            self._call_for_the_engine()
        self._thread.join(deadline_seconds)
        return not self._thread.is_alive()

    def submit_query(self, task: QueryTask) -> None:
        """Queue a query. Raises: Overloaded, WorkerUnavailable."""
        with self._wake:
            self._check_open()
            # Those who gave up count no more, though the engine has not dropped them yet.
            waiting = sum(not waiter.cancelled.is_set() for waiter in self._waiting)
            if waiting >= self._max_waiting:
                raise Overloaded(self._max_waiting)
            self._waiting.append(task)
            self._call_for_the_engine()
        arrival = task.sequence.context.arrival
        if arrival is not None:
            # The engine may be waiting for another one then.
            arrival.when_settled(self._arrival_settled)

    def submit_build(self, task: BuildTask) -> None:
        """Queue a build; builds run one at a time, in order. Raises: WorkerUnavailable."""
        with self._wake:
            self._check_open()
            self._builds.append(task)
            self._call_for_the_engine()

    def stats(self) -> SchedulerStats:
        """Counts as of now; all zero at idle."""
        with self._wake:
            return SchedulerStats(
                len(self._running),
                len(self._waiting),
                len(self._builds),
                self._thread.is_alive() and not self._is_stopping,
            )

    def _arrival_settled(self) -> None:
        with self._wake:
            self._call_for_the_engine()

    def _call_for_the_engine(self) -> None:
        self._wake.notify()
        if self._awaited is not None:
            self._awaited.interrupt()

    def _check_open(self) -> None:
        if self._is_stopping or not self._thread.is_alive():
            raise WorkerUnavailable("the engine is not running")

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while self._wait_for_work():
                self._admit()
                self._read_question()
                self._decode()
                self._build()
        finally:
            self._abandon_all()

    def _wait_for_work(self) -> bool:
        """Block while there is nothing to do. Returns False when the thread is to end."""
        with self._wake:
            while not self._is_stopping and not (self._running or self._waiting or self._builds):
                self._wake.wait()
            return not self._is_stopping

    def _admit(self) -> None:
        """Drop what was cancelled and take new queries up to the limit."""
        with self._wake:
            self._running = [task for task in self._running if not task.cancelled.is_set()]
            self._waiting = deque(task for task in self._waiting if not task.cancelled.is_set())
            while self._waiting and len(self._running) < MAX_RUNNING:
                self._running.append(self._waiting.popleft())

    def _read_question(self) -> None:
        """One slice of the oldest question that is not wholly read and need not wait."""
        unread = [task for task in self._running if not task.sequence.is_prefilled]
        task = next((t for t in unread if not t.sequence.has_to_wait), None)
        if task is None:
            task = self._worth_waiting_for(unread)
        if task is None:
            return
        try:
            text = prefill_question(self._model, task.sequence)
        except NotYet:
            return
        # Whatever one question raises must reach its asker and spare the engine.
        except Exception as error:  # noqa: BLE001
            self._finish(task, error)
            return
        finally:
            with self._wake:
                self._awaited = None
        if text is not None:
            self._deliver(task, text)

    def _worth_waiting_for(self, unread: list[QueryTask]) -> QueryTask | None:
        """The oldest question whose context is arriving, when there is nothing else to do.

        From then on, until it is read, whoever submits work interrupts the wait.
        """
        with self._wake:
            can_admit = bool(self._waiting) and len(self._running) < MAX_RUNNING
            is_busy = self._is_stopping or can_admit or bool(self._builds)
            if is_busy or not unread or len(unread) < len(self._running):
                return None
            self._awaited = unread[0].sequence.context.arrival
            assert self._awaited is not None, "only what is arriving has to wait"
            self._awaited.resume()
            return unread[0]

    def _decode(self) -> None:
        """One token for every sequence whose question is read."""
        tasks = [task for task in self._running if task.sequence.is_prefilled]
        if not tasks:
            return
        try:
            outcomes = decode_step(self._model, [task.sequence for task in tasks])
        # As above; a forward that fails is every member's failure.
        except Exception as error:  # noqa: BLE001
            for task in tasks:
                self._finish(task, error)
            return
        for task, outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._finish(task, outcome)
            else:
                self._deliver(task, outcome)

    def _build(self) -> None:
        """One work item of the oldest build."""
        with self._wake:
            task = self._builds[0] if self._builds else None
        if task is None:
            return
        built, failure = None, None
        try:
            if not task.cancelled.is_set():
                task.on_progress(next(task.steps))
                return
            task.steps.close()
        except StopIteration as finished:
            built = finished.value
        # As above: a failing build is reported, and the engine lives.
        except Exception as error:  # noqa: BLE001
            failure = error
        with self._wake:
            self._builds.popleft()
        task.on_finished(built, failure)

    def _deliver(self, task: QueryTask, text: str) -> None:
        if text:
            task.listener.on_text(text)
        if task.sequence.finish_reason is not None:
            self._finish(task, None)

    def _finish(self, task: QueryTask, error: BaseException | None) -> None:
        with self._wake:
            self._running.remove(task)
        task.listener.on_finished(error)

    def _abandon_all(self) -> None:
        """Tell everybody who still waits that the engine ended."""
        with self._wake:
            self._is_stopping = True
            tasks = [*self._running, *self._waiting]
            builds = list(self._builds)
            self._running.clear()
            self._waiting.clear()
            self._builds.clear()
        stopped = WorkerUnavailable("the engine is stopping")
        for task in tasks:
            task.listener.on_finished(stopped)
        for build in builds:
            build.steps.close()
            build.on_finished(None, stopped)
