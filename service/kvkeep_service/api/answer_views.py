"""What goes out over HTTP of an answer: its pieces and the whole."""

from typing import Final, Literal

from pydantic import Field

from kvkeep_service.api.views import CONTEXT_EXAMPLE, Time, View, utc
from kvkeep_service.ports import (
    AnswerEvent,
    CacheSource,
    FinishReason,
    QueryTimings,
    TokenChance,
    TokenLogprob,
)

_ON_DEMAND: Final = ("prompt_token_ids", "token_ids", "logprobs")


class CachedTokens(View):
    """Tokens that were not read again."""

    cached_tokens: int
    """Tokens of the prompt that came from the cache, or from earlier turns of a session."""


class Usage(View):
    """Tokens of one answer, named as in the OpenAI API."""

    prompt_tokens: int
    """Tokens of document, earlier turns and question together."""
    completion_tokens: int
    """Tokens of the answer."""
    total_tokens: int
    """The sum of both."""
    prompt_tokens_details: CachedTokens
    """How much of the prompt was not read again."""


class TimingsView(View):
    """Where the time of an answer went."""

    queue_ms: float
    """Milliseconds that the question waited to be read, once the cache was loaded."""
    load_ms: float
    """Milliseconds until the cache, or its first layer, was there; next to none when resident."""
    source: CacheSource
    """Where the cache was: "resident", in "host" memory, on "disk", or in the "store"."""
    prefill_ms: float
    """Milliseconds from reading the question to the first token, with layers that came late."""
    ttft_ms: float
    """Milliseconds from the arrival of the question to the first token of the answer."""
    decode_tps: float
    """Tokens per second after the first; 0 for an answer of one token."""

    @classmethod
    def of(cls, timings: QueryTimings) -> "TimingsView":
        """Show timings, to the microsecond."""
        return cls(
            queue_ms=round(timings.queue_ms, 3),
            load_ms=round(timings.load_ms, 3),
            source=timings.source,
            prefill_ms=round(timings.prefill_ms, 3),
            ttft_ms=round(timings.ttft_ms, 3),
            decode_tps=round(timings.decode_tps, 3),
        )


class TokenChanceView(View):
    """A token, and how likely it was."""

    token: str
    """Its text by itself; a part of a character shows as U+FFFD."""
    token_id: int
    """Its number, which names it exactly."""
    logprob: float
    """Natural logarithm of its probability, before temperature, top_p and top_k."""

    @classmethod
    def of(cls, chance: TokenChance) -> "TokenChanceView":
        """Show a token."""
        return cls(token=chance.text, token_id=chance.token_id, logprob=chance.logprob)


class TokenLogprobView(TokenChanceView):
    """A token of the answer, and what could have stood in its place."""

    top_logprobs: list[TokenChanceView]
    """The likeliest tokens in its place, the likeliest first; as many as were asked for."""


class AnswerView(View):
    """One answer. Token ids and logprobs are there only when they were asked for."""

    id: str = Field(examples=["ans_01K9Z3V5J8Q6W2E4R7T1Y0N5PX"])
    """Names the answer: `ans_` and 26 characters."""
    object: Literal["answer"] = "answer"
    """Always "answer"."""
    context_id: str = Field(examples=[CONTEXT_EXAMPLE])
    """The context that was asked."""
    model: str
    """The model that answered."""
    created_at: Time
    """When the answer was complete, UTC."""
    answer: str = Field(examples=["On 31 March 2029."])
    """The whole text."""
    finish_reason: FinishReason
    """Either "stop": it came to its end, or "length": it was cut at a limit."""
    usage: Usage
    """Its lengths, in tokens."""
    timings: TimingsView
    """Where its time went."""
    ratio: float
    """Fraction of KV pairs that was read, 0.05 to 1: with min_ratio, perhaps less than asked."""
    prompt_token_ids: list[int] | None = None
    """Exactly what the model saw; there only with return_token_ids."""
    token_ids: list[int] | None = None
    """The tokens of the answer; there only with return_token_ids."""
    logprobs: list[TokenLogprobView] | None = None
    """Of each token of the answer, the one that ended it included; there only with logprobs."""

    @classmethod
    def of(
        cls, answer_id: str, context_id: str, model: str, created_at: float, answer: AnswerEvent
    ) -> "AnswerView":
        """Show an answer."""
        return cls(
            id=answer_id,
            context_id=context_id,
            model=model,
            created_at=utc(created_at),
            answer=answer.text,
            finish_reason=answer.finish_reason,
            usage=Usage(
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
                total_tokens=answer.prompt_tokens + answer.completion_tokens,
                prompt_tokens_details=CachedTokens(cached_tokens=answer.cached_tokens),
            ),
            timings=TimingsView.of(answer.timings),
            ratio=answer.ratio,
            prompt_token_ids=_ids(answer.prompt_token_ids),
            token_ids=_ids(answer.token_ids),
            logprobs=_logprobs(answer.logprobs),
        )

    def to_json(self) -> str:
        """Render, without the lists nobody asked for."""
        unasked = {name for name in _ON_DEMAND if getattr(self, name) is None}
        return self.model_dump_json(exclude=unasked)


class AnswerList(View):
    """The answers to several questions, in the order of the questions."""

    object: Literal["list"] = "list"
    """Always "list"."""
    data: list[AnswerView]
    """One answer for each question."""

    def to_json(self) -> str:
        """Render, without the lists nobody asked for."""
        answers = ",".join(answer.to_json() for answer in self.data)
        return f'{{"object":"list","data":[{answers}]}}'


class TokenView(View):
    """A piece of an answer; the joined pieces of one question are its whole answer."""

    text: str
    """Whole characters of the answer."""
    index: int
    """Number of the piece, counted from 0 for each question."""
    question: int | None = None
    """With questions: the number of the question that is answered, counted from 0."""

    def to_json(self) -> str:
        """Render, without ``question`` where there is one only."""
        return self.model_dump_json(exclude_none=True)


def _logprobs(tokens: tuple[TokenLogprob, ...] | None) -> list[TokenLogprobView] | None:
    if tokens is None:
        return None
    return [
        TokenLogprobView(
            token=token.chosen.text,
            token_id=token.chosen.token_id,
            logprob=token.chosen.logprob,
            top_logprobs=[TokenChanceView.of(chance) for chance in token.top],
        )
        for token in tokens
    ]


def _ids(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else list(ids)
