"""One query between the engine's thread and the event loop: its events, and its answer."""

import asyncio
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Sequential
from contextlib import suppress

from kvkeep_service.engine.answering import QueryTask
from kvkeep_service.engine.decode import Sequence
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.ports import AnswerEvent, QueryRequest, QueryTimings, TokenEvent
from kvkeep_service.residency import Pinned


class RunningQuery:
    """Listens to the engine and hands its pieces on; created and read on the event loop."""

    def __init__(self, sequence: Sequence, *, received_at: float, tenant: str = "") -> None:
        """``received_at``: when the query arrived, by ``time.perf_counter``.

        ``tenant``: whose turn it takes while it waits.
        """
        self._tenant = tenant
        self._sequence = sequence
        self._received_at = received_at
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        self._pieces: list[str] = []
        self._submitted_at = received_at
        self._ended_at = received_at

    def on_text(self, text: str) -> None:
        """As ``QueryListener``, on the engine's thread."""
        self._post(text)

    def on_finished(self, error: BaseException | None) -> None:
        """As ``QueryListener``, on the engine's thread."""
        self._ended_at = time.perf_counter()
        self._post(error)

    async def events(self, scheduler: Scheduler) -> AsyncGenerator[TokenEvent]:
        """Run to the end. Closing the iterator stops the generation within one token.

        Raises: Overloaded, WorkerUnavailable, and whatever ended the sequence in the engine.
        """
        task = QueryTask(self._sequence, self, self._tenant)
        self._submitted_at = time.perf_counter()
        scheduler.submit_query(task)
        try:
            while True:
                news = await self._news.get()
                if isinstance(news, BaseException):
                    raise news
                if news is None:
                    break
                self._pieces.append(news)
                yield TokenEvent(news, len(self._pieces) - 1)
        finally:
            task.cancelled.set()

    def answer(
        self, pinned: Pinned, request: QueryRequest, document_ids: Sequential[int] | None
    ) -> AnswerEvent:
        """The whole answer, once ``events`` has ended by itself.

        ``document_ids``: what stands before the question, when token ids are wanted and it can
        be told.
        """
        sequence = self._sequence
        assert sequence.finish_reason is not None
        num_tokens = pinned.context.num_tokens
        prompt_ids = None if document_ids is None else (*document_ids, *sequence.question_ids)
        return AnswerEvent(
            text="".join(self._pieces),
            finish_reason=sequence.finish_reason,
            prompt_tokens=num_tokens + len(sequence.question_ids),
            cached_tokens=num_tokens,
            completion_tokens=len(sequence.generated),
            ratio=sequence.context.ratio,
            timings=self._timings(pinned),
            prompt_token_ids=prompt_ids,
            token_ids=tuple(sequence.generated) if request.return_token_ids else None,
        )

    def _post(self, news: str | BaseException | None) -> None:
        # A loop that was closed has nobody left to tell, and the engine's thread must live.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    def _timings(self, pinned: Pinned) -> QueryTimings:
        sequence = self._sequence
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
