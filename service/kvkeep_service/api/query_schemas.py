"""What goes in over HTTP to ask: one question, several, or a conversation.

``ratio`` is the fraction of KV pairs kept.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from kvkeep_service.api.strict import WAIT_SECONDS_MAX, Body, FreeJson, Strict
from kvkeep_service.bounds import Bounds
from kvkeep_service.budget import check_ratio
from kvkeep_service.errors import InvalidRequest
from kvkeep_service.ids import is_answer_id
from kvkeep_service.ports import Turn

QUESTIONS_MAX: Final = 64
MESSAGES_MAX: Final = 128
_BLANK: Final = "must not be empty or only white space"


class Message(Strict):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    """Who speaks: "user" and "assistant" in turns, "system" only before them."""
    content: str
    """What is said. Only an answer, which is the assistant's, may be empty."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with what was said before it; ``system`` stands before the first new turn."""

    question: str
    history: tuple[Turn, ...] = ()
    system: str | None = None


class Query(Body):
    """Ask one question, several at once, or go on with a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"question": "When does the agreement end?", "max_tokens": 64},
                {"questions": ["Who are the parties?", "What is the fee?"], "max_tokens": 64},
                {
                    "messages": [
                        {"role": "user", "content": "When does the agreement end?"},
                        {"role": "assistant", "content": "On 31 March 2029."},
                        {"role": "user", "content": "Can it be extended?"},
                    ]
                },
                {
                    "question": "And before that?",
                    "session": "ans_01K9Z3V5J8Q6W2E4R7T1Y0N5PX",
                    "fork": True,
                },
            ]
        }
    )

    question: str | None = None
    """The question, not only white space. Send one of question, questions and messages."""
    questions: list[str] | None = Field(None, min_length=1, max_length=QUESTIONS_MAX)
    """1 to 64 questions, answered together and each as if it were alone; a list comes back."""
    messages: list[Message] | None = Field(None, min_length=1, max_length=MESSAGES_MAX)
    """1 to 128 turns of a conversation about the document; the last one is the user's."""
    system: str | None = None
    """Extra system text, read after the document and before the first new turn. null: none."""
    ratio: float | None = None
    """One of the context's ratios_available, below 0.15 only with allow_lossy. null: its own."""
    min_ratio: float | None = None
    """Least of ratios_available that will do where ratio is not in memory yet. null: no less."""
    allow_lossy: bool = False
    """Whether a ratio below 0.15, at which answers suffer, is meant."""
    max_tokens: Annotated[int, Bounds(1, 1_000_000)] = 256
    """Most tokens of the answer, 1 to 1000000; fewer when the model has fewer positions left."""
    temperature: Annotated[float, Bounds(0, 2)] = 0.0
    """How much chance there is in the answer, 0 to 2; 0 always takes the likeliest token."""
    top_p: Annotated[float, Bounds(0, 1, is_above=True)] = 1.0
    """Sample from the likeliest tokens of this joint probability, above 0 to 1; 1: all."""
    top_k: Annotated[int, Bounds(0, 1_000_000)] = 0
    """Sample from this many likeliest tokens, 0 to 1000000; 0: all."""
    seed: Annotated[int, Bounds(0, 2**63 - 1)] | None = None
    """Makes chance repeatable, 0 to 2^63-1. null: another one each time."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list, max_length=8
    )
    """At most 8 texts of 1 to 256 characters; the answer ends before the first that appears."""
    logprobs: bool = False
    """Whether the answer tells the logarithm of the probability of each of its tokens."""
    top_logprobs: Annotated[int, Bounds(0, 20)] = 0
    """With logprobs: how many of the likeliest tokens to tell in the place of each, 0 to 20."""
    return_token_ids: bool = False
    """Whether the answer carries prompt_token_ids and token_ids."""
    chat_template_kwargs: dict[str, FreeJson] = Field(default_factory=dict, max_length=16)
    """At most 16 arguments of the chat template; they may not change what precedes the question."""
    stream: bool = False
    """Whether the answer comes as server-sent events while it is written."""
    session: str | None = None
    """Id of an earlier answer about this context, whose conversation the question continues."""
    fork: bool = False
    """With session: whether that answer is to stay, so that it can be continued once more."""
    wait: Annotated[float, Bounds(0, WAIT_SECONDS_MAX)] = 0
    """Most seconds to hold the request until the context is ready, 0 to 300; as `?wait=`."""

    def asked(self) -> tuple[Asked, ...]:
        """What is asked, checked as far as no context is needed.

        Raises: InvalidRequest, naming the field: for what does not go together with another, or
            is blank, and for turns out of order.
        """
        forms = ("question", "questions", "messages")
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(given[1], f"cannot be sent together with {given[0]}")
        if not given:
            raise InvalidRequest("question", "is missing: send it, or questions or messages")
        self._check_ratios()
        self._check_session()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only sent with logprobs")
        if self.messages is not None:
            return (self._conversation(self.messages),)
        if self.questions is not None:
            for index, question in enumerate(self.questions):
                _check_not_blank(f"questions.{index}", question)
            return tuple(Asked(question, system=self.system) for question in self.questions)
        question = self.question or ""
        _check_not_blank("question", question)
        return (Asked(question, system=self.system),)

    def _check_ratios(self) -> None:
        for name, value in (("ratio", self.ratio), ("min_ratio", self.min_ratio)):
            if value is None:
                continue
            if self.session is not None:
                raise InvalidRequest(name, "a session goes on at the ratio of its first answer")
            check_ratio(name, value, allow_lossy=self.allow_lossy)

    def _check_session(self) -> None:
        if self.session is None:
            if self.fork:
                raise InvalidRequest("fork", "is only sent with session")
            return
        if not is_answer_id(self.session):
            raise InvalidRequest("session", "is not the id of an answer, ans_ and 26 characters")
        if self.messages is not None:
            raise InvalidRequest("messages", "a session knows what was said; send a question")
        if self.questions is not None and not self.fork:
            raise InvalidRequest("questions", "several go on from one answer only with fork")

    def _conversation(self, messages: list[Message]) -> Asked:
        system, first = self.system, 0
        if messages[0].role == "system":
            if system is not None:
                raise InvalidRequest("system", "is in messages already")
            _check_not_blank("messages.0.content", messages[0].content)
            system, first = messages[0].content, 1
        turns: list[Turn] = []
        for index, message in enumerate(messages[first:], first):
            expected = "user" if len(turns) % 2 == 0 else "assistant"
            if message.role == "system" or message.role != expected:
                raise InvalidRequest(f"messages.{index}.role", f"must be {expected} here")
            if message.role == "user":
                _check_not_blank(f"messages.{index}.content", message.content)
            turns.append(Turn(message.role, message.content))
        if not turns or turns[-1].role != "user":
            raise InvalidRequest("messages", "must end with a message of the user")
        return Asked(turns[-1].text, tuple(turns[:-1]), system)


def _check_not_blank(field: str, text: str) -> None:
    if not text.strip():
        raise InvalidRequest(field, _BLANK)
