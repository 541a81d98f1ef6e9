"""Queries between the engine's thread and the event loop: their events, and their answers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as Sequential
from contextlib import suppress
from typing import NamedTuple

from kvkeep_service.engine.answering import QueryTask
from kvkeep_service.engine.decode import Sequence
from kvkeep_service.engine.sampling import Chance
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.ports import (
    AnswerEvent,
    QueryRequest,
    QueryTimings,
    TokenChance,
    TokenEvent,
    TokenLogprob,
)
from kvkeep_service.residency import Pinned


class _News(NamedTuple):
    query: "RunningQuery"
    what: str | BaseException | None


_Inbox = asyncio.Queue[_News]


class RunningQuery:
    """Listens to the engine; created and read on the event loop."""

    def __init__(
        self, sequence: Sequence, *, received_at: float, tenant: str = "", index: int = 0
    ) -> None:
        """``received_at``: when the query arrived, by ``time.perf_counter``.

        ``tenant``: whose turn it takes while it waits. ``index``: its place among those that are
        answered together.
        """
        self.sequence = sequence
        self.index = index
        self._tenant = tenant
        self._received_at = received_at
        self._loop = asyncio.get_running_loop()
        self._inbox: _Inbox | None = None
        self._pieces: list[str] = []
        self._submitted_at = received_at
        self._ended_at = received_at

    @property
    def text(self) -> str:
        """What was generated so far."""
        return "".join(self._pieces)

    def on_text(self, text: str) -> None:
        """As ``QueryListener``, on the engine's thread."""
        self._post(text)

    def on_finished(self, error: BaseException | None) -> None:
        """As ``QueryListener``, on the engine's thread."""
        self._ended_at = time.perf_counter()
        self._post(error)

    def submit(self, scheduler: Scheduler, inbox: _Inbox) -> QueryTask:
        """Hand over to the engine, whose news go to ``inbox``.

        Raises: Overloaded, WorkerUnavailable.
        """
        self._inbox = inbox
        task = QueryTask(self.sequence, self, self._tenant)
        self._submitted_at = time.perf_counter()
        scheduler.submit_query(task)
        return task

    def took(self, text: str) -> TokenEvent:
        """Add a piece to the answer."""
        self._pieces.append(text)
        return TokenEvent(text, len(self._pieces) - 1, self.index)

    def answer(
        self,
        pinned: Pinned,
        request: QueryRequest,
        document_ids: Sequential[int] | None,
        token_text: Callable[[int], str],
    ) -> AnswerEvent:
        """The whole answer, once the engine has finished it.

        ``document_ids``: what stands before the question, when token ids are wanted and it can
        be told. ``token_text`` shows a token.
        """
        sequence = self.sequence
        assert sequence.finish_reason is not None
        num_tokens = pinned.context.num_tokens
        prompt_ids = None if document_ids is None else (*document_ids, *sequence.question_ids)
        return AnswerEvent(
            text=self.text,
            finish_reason=sequence.finish_reason,
            prompt_tokens=num_tokens + len(sequence.question_ids),
            cached_tokens=num_tokens + sequence.num_reused,
            completion_tokens=len(sequence.generated),
            ratio=sequence.context.ratio,
            timings=self._timings(pinned),
            prompt_token_ids=prompt_ids,
            token_ids=tuple(sequence.generated) if request.return_token_ids else None,
            logprobs=None if request.top_logprobs is None else self._logprobs(token_text),
            question=self.index,
        )

    def _post(self, what: str | BaseException | None) -> None:
        assert self._inbox is not None, "the engine has it since it was submitted"
        # A loop that was closed has nobody left to tell, and the engine's thread must live.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, _News(self, what))

    def _logprobs(self, token_text: Callable[[int], str]) -> tuple[TokenLogprob, ...]:
        def named(chance: Chance) -> TokenChance:
            return TokenChance(chance.token_id, token_text(chance.token_id), chance.logprob)

        return tuple(
            TokenLogprob(named(token.chosen), tuple(map(named, token.top)))
            for token in self.sequence.logprobs
        )

    def _timings(self, pinned: Pinned) -> QueryTimings:
        sequence = self.sequence
        assert sequence.read_at is not None
        assert sequence.first_token_at is not None
        decode_seconds = self._ended_at - sequence.first_token_at
        later_tokens = len(sequence.generated) - 1
        return QueryTimings(
            queue_ms=1000 * (sequence.read_at - self._submitted_at),
            load_ms=1000 * pinned.load_seconds,
            source=pinned.source,
            prefill_ms=1000 * (sequence.first_token_at - sequence.read_at),
            ttft_ms=1000 * (sequence.first_token_at - self._received_at),
            decode_tps=later_tokens / decode_seconds if later_tokens else 0.0,
        )


async def run(
    queries: Sequential[RunningQuery], scheduler: Scheduler
) -> AsyncGenerator[TokenEvent | RunningQuery]:
    """Run queries to their ends: pieces as they come, and each query once it is finished.

    Closing the iterator stops all of them within one token.
    Raises: Overloaded, WorkerUnavailable, and whatever ended one of them in the engine, which
        stops the others.
    """
    inbox: _Inbox = asyncio.Queue()
    tasks: list[QueryTask] = []
    try:
        for query in queries:
            # When one is refused, those before it have to be cancelled.
            tasks.append(query.submit(scheduler, inbox))  # noqa: PERF401
        running = len(tasks)
        while running:
            query, news = await inbox.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                running -= 1
                yield query
            else:
                yield query.took(news)
    finally:
        for task in tasks:
            task.cancelled.set()
