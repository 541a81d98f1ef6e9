"""An answer that arrives piece by piece."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from kvkeep_client.errors import StreamInterrupted
from kvkeep_client.models import Answer, read_answer
from kvkeep_client.transport import EventStream


class AnswerStream:
    """Iterate once to get the text; joined, the pieces equal ``answer.answer``.

    Leaving the loop early hangs up, which stops the generation on the server.
    """

    def __init__(
        self, events: EventStream, on_whole: Callable[[Answer], None] = lambda _: None
    ) -> None:
        """``on_whole`` is told of the answer once it is whole."""
        self._events = events
        self._on_whole = on_whole
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield text as it is generated.

        Raises: APIError, when the server fails on the way; StreamInterrupted, when the
            connection ends before the answer does. Neither is retried: text was handed out.
        """
        with self._events as events:
            for event in events:
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

    def close(self) -> None:
        """Hang up, which stops the generation. Closing twice is fine."""
        self._events.close()

    def __enter__(self) -> Self:
        """Hang up at the end of the block, however it ends."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hang up."""
        self.close()
