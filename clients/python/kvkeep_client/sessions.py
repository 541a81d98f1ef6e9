"""Conversations about one context, of which the server keeps what was read."""

from typing import Unpack

from kvkeep_client import calls
from kvkeep_client.answers import AnswerStream
from kvkeep_client.calls import Continued, QueryOptions
from kvkeep_client.models import Answer, read_answer
from kvkeep_client.transport import Transport


class Session:
    """One conversation, a question at a time. The server forgets it after some time unused.

    A question that fails leaves the session as it was. ``ratio`` and ``min_ratio`` are for the
    first question only: all others are read at the ratio of that one.
    """

    def __init__(self, transport: Transport, context_id: str, answer_id: str | None) -> None:
        self._transport = transport
        self._context_id = context_id
        self._continued = None if answer_id is None else Continued(answer_id)

    @property
    def answer_id(self) -> str | None:
        """The answer that the next question continues; None before the first."""
        return None if self._continued is None else self._continued.answer_id

    def ask(self, question: str, **options: Unpack[QueryOptions]) -> Answer:
        """Ask the next question and return the whole answer. Modifies ``answer_id``.

        Raises: SessionGone, when the server has forgotten the conversation, and the other errors
            of the API.
        """
        call = calls.query(
            self._context_id, question, stream=False, continued=self._continued, **options
        )
        answer = read_answer(self._transport.fields(call))
        self._go_on(answer)
        return answer

    def stream(self, question: str, **options: Unpack[QueryOptions]) -> AnswerStream:
        """Ask the next question and return its text as it is generated.

        Modifies ``answer_id`` at the end of the text: who leaves it early goes on from the last
        whole answer. Raises: as ``ask``.
        """
        call = calls.query(
            self._context_id, question, stream=True, continued=self._continued, **options
        )
        return AnswerStream(self._transport.events(call), self._go_on)

    def fork(self) -> "Session":
        """Another conversation with the same beginning; both can go on.

        Sends nothing. Raises: ValueError, before the first question.
        """
        if self._continued is None:
            raise ValueError("ask something first: there is nothing to go on from yet")
        other = Session(self._transport, self._context_id, None)
        # Whichever of the two goes on first must leave the answer to the other.
        self._continued = other._continued = Continued(self._continued.answer_id, fork=True)
        return other

    def _go_on(self, answer: Answer) -> None:
        self._continued = Continued(answer.id)
