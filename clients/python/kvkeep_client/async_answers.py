"""Answers that arrive piece by piece, and conversations, without blocking."""

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self, Unpack

from kvkeep_client import calls
from kvkeep_client.async_transport import AsyncEventStream, AsyncTransport
from kvkeep_client.calls import Continued, QueryOptions
from kvkeep_client.errors import StreamInterrupted
from kvkeep_client.models import Answer, read_answer


class AsyncAnswerStream:
    """Iterate once to get the text; joined, the pieces equal ``answer.answer``.

    Leave the loop early inside ``async with``, which hangs up and stops the generation.
    """

    def __init__(
        self, events: AsyncEventStream, on_whole: Callable[[Answer], None] = lambda _: None
    ) -> None:
        """``on_whole`` is told of the answer once it is whole."""
        self._events = events
        self._on_whole = on_whole
        self._answer: Answer | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield text as it is generated. Raises: as ``AnswerStream``."""
        async with self._events as events:
            async for event in events:
                if event.name == "token":
                    yield event.data.text("text")
                elif event.name == "done":
                    self._answer = read_answer(event.data)
                    self._on_whole(self._answer)
                    return
        raise StreamInterrupted(
            "the server closed the stream before the answer was whole",
            request_id=self._events.request_id,
        )

    @property
    def answer(self) -> Answer:
        """The whole answer, once the text has been read to its end.

        Raises: RuntimeError, before that.
        """
        if self._answer is None:
            raise RuntimeError("read the stream to its end first: the answer is not whole yet")
        return self._answer

    async def close(self) -> None:
        """Hang up, which stops the generation. Closing twice is fine."""
        await self._events.close()

    async def __aenter__(self) -> Self:
        """Hang up at the end of the block, however it ends."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hang up."""
        await self.close()


class AsyncSession:
    """One conversation, a question at a time; see ``Session``."""

    def __init__(self, transport: AsyncTransport, context_id: str, answer_id: str | None) -> None:
        self._transport = transport
        self._context_id = context_id
        self._continued = None if answer_id is None else Continued(answer_id)

    @property
    def answer_id(self) -> str | None:
        """The answer that the next question continues; None before the first."""
        return None if self._continued is None else self._continued.answer_id

    async def ask(self, question: str, **options: Unpack[QueryOptions]) -> Answer:
        """As ``Session.ask``."""
        call = calls.query(
            self._context_id, question, stream=False, continued=self._continued, **options
        )
        answer = read_answer(await self._transport.fields(call))
        self._go_on(answer)
        return answer

    async def stream(self, question: str, **options: Unpack[QueryOptions]) -> AsyncAnswerStream:
        """As ``Session.stream``."""
        call = calls.query(
            self._context_id, question, stream=True, continued=self._continued, **options
        )
        return AsyncAnswerStream(await self._transport.events(call), self._go_on)

    def fork(self) -> "AsyncSession":
        """As ``Session.fork``."""
        if self._continued is None:
            raise ValueError("ask something first: there is nothing to go on from yet")
        other = AsyncSession(self._transport, self._context_id, None)
        # Whichever of the two goes on first must leave the answer to the other.
        self._continued = other._continued = Continued(self._continued.answer_id, fork=True)
        return other

    def _go_on(self, answer: Answer) -> None:
        self._continued = Continued(answer.id)
