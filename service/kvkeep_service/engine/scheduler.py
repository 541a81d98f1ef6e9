"""The engine's thread: every forward of the model happens here, one after the other.

A round of answers reads new questions, as many tokens as one slice has, and gives every running
query one token; so questions join and leave at any token. Builds have what time is left, and a
share of it when there is none: a work item of theirs is a slice of tokens in one layer, so that an
answer never waits for longer than that share and one such item.

A question whose context is still being loaded is read layer by layer as they arrive, but only
while nothing else is to be done: whatever is submitted meanwhile makes the engine give that up,
and begin it again later.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvkeep_service.engine.answering import Answering, QueryTask
from kvkeep_service.engine.arrival import LayerArrival
from kvkeep_service.engine.build_share import BuildShare
from kvkeep_service.engine.builds import Builds, BuildTask
from kvkeep_service.engine.fair_queue import FairQueue
from kvkeep_service.engine.graphs import GraphOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine_counts import EngineCounts
from kvkeep_service.errors import Overloaded, WorkerUnavailable

MAX_RUNNING = 32
"""Sequences decoded together; more wait."""

_RETRY_AFTER_MAX_SECONDS = 60


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """How much is in the engine now."""

    running: int
    waiting: int
    builds: int
    is_alive: bool


class Scheduler:
    """Continuous batching over queries of any contexts, tenants in turn, with builds in between.

    ``submit_*``, ``stats`` and ``counts`` may be called from any thread.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_waiting: int,
        threads: int | None = None,
        build_slice_seconds: float | None = None,
        on_memory_short: Callable[[], None] = lambda: None,
        graphs: GraphOptions = GraphOptions(),  # noqa: B008  # it is frozen
    ) -> None:
        """``max_waiting`` queries may wait; ``threads`` is for torch on a CPU, None its choice.

        ``build_slice_seconds``: see ``BuildShare``. ``on_memory_short`` may give up what can be
        had again; it is called on the engine's thread.
        """
        self._max_waiting = max_waiting
        self._threads = threads
        self._answering = Answering(model, on_memory_short, graphs)
        self._builds = Builds()
        self._share = BuildShare(build_slice_seconds, model.device)
        self._answer_seconds = 0.0
        self._wake = threading.Condition()
        self._waiting: FairQueue[QueryTask] = FairQueue()
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
        """Queue a query. Raises: Overloaded, WorkerUnavailable.

        A full queue takes it in place of the newest of a tenant that has more waiting.
        """
        displaced = None
        with self._wake:
            self._check_open()
            # Those who gave up count no more, though the engine has not dropped them yet.
            self._waiting.discard(_is_cancelled)
            if len(self._waiting) >= self._max_waiting:
                displaced = self._waiting.displaced_by(task)
                if displaced is None:
                    raise self._overloaded()
            self._waiting.put(task)
            told = self._overloaded()
            self._call_for_the_engine()
        if displaced is not None:
            displaced.listener.on_finished(told)
        arrival = task.sequence.context.arrival
        if arrival is not None:
            # The engine may be waiting for another one then.
            arrival.when_settled(self._arrival_settled)

    def submit_build(self, task: BuildTask) -> None:
        """Queue a build; builds run one at a time, in order. Raises: WorkerUnavailable."""
        with self._wake:
            self._check_open()
            self._builds.submit(task)
            self._call_for_the_engine()

    def stats(self) -> SchedulerStats:
        """Counts as of now; all zero at idle."""
        with self._wake:
            return SchedulerStats(
                len(self._answering.running),
                len(self._waiting),
                len(self._builds),
                self._thread.is_alive() and not self._is_stopping,
            )

    def counts(self) -> EngineCounts:
        """What happened since the start."""
        answering = self._answering
        return EngineCounts(
            self._answer_seconds,
            self._share.build_seconds,
            answering.num_out_of_memory,
            answering.num_shed,
            answering.steps,
        )

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while self._wait_for_work():
                has_answered = self._answer()
                if self._builds and not (has_answered and self._share.is_used_up):
                    self._build()
                elif not has_answered:
                    self._await_layers()
        finally:
            self._abandon_all()

    def _wait_for_work(self) -> bool:
        """Block while there is nothing to do. Returns False when the thread is to end."""
        with self._wake:
            while not (self._is_stopping or self._has_work):
                self._wake.wait()
            return not self._is_stopping

    def _answer(self) -> bool:
        """One round: who joins, what is read, a token for each. False when nothing was done."""
        started = time.perf_counter()
        self._admit()
        has_read = self._answering.read()
        read = time.perf_counter()
        has_decoded = self._answering.decode()
        if not (has_decoded or has_read):
            self._share.forget()
            return False
        ended = time.perf_counter()
        self._answer_seconds += ended - started
        self._share.earn(read - started, ended - read if has_decoded else 0.0)
        return True

    def _admit(self) -> None:
        """Drop what was cancelled and take new queries up to the limit."""
        with self._wake:
            self._waiting.discard(_is_cancelled)
            self._answering.drop_cancelled()
            while self._waiting and len(self._answering.running) < MAX_RUNNING:
                self._answering.running.append(self._waiting.take())

    def _build(self) -> None:
        """One work item of a build, and more while its share lasts."""
        while self._builds and not self._is_stopping:
            self._share.resume()
            self._builds.advance()
            self._share.pause()
            if self._share.is_used_up:
                break

    def _await_layers(self) -> None:
        """Read the oldest question whose context is arriving: there is nothing else to do.

        From then on, until it is read, whoever submits work interrupts the wait.
        """
        with self._wake:
            running = self._answering.running
            can_admit = bool(self._waiting) and len(running) < MAX_RUNNING
            if self._is_stopping or can_admit or self._builds or not running:
                return
            task = running[0]
            self._awaited = task.sequence.context.arrival
            assert self._awaited is not None, "only what is arriving has to wait"
            self._awaited.resume()
        self._answering.read_arriving(task)
        with self._wake:
            self._awaited = None

    @property
    def _has_work(self) -> bool:
        return bool(self._answering.running or self._waiting or self._builds)

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

    def _overloaded(self) -> Overloaded:
        """To be asked again when as much time has passed as the oldest has waited by now."""
        oldest = min((task.submitted_at for task in self._waiting), default=time.monotonic())
        seconds = 1 + int(time.monotonic() - oldest)
        return Overloaded(self._max_waiting, min(seconds, _RETRY_AFTER_MAX_SECONDS))

    def _abandon_all(self) -> None:
        """Tell everybody who still waits that the engine ended."""
        stopped = WorkerUnavailable("the engine is stopping")
        with self._wake:
            self._is_stopping = True
            waiting = list(self._waiting)
            self._waiting.clear()
        self._answering.end_all(stopped)
        for task in waiting:
            task.listener.on_finished(stopped)
        self._builds.abandon_all(stopped)


def _is_cancelled(task: QueryTask) -> bool:
    return task.cancelled.is_set()
