"""What goes out over HTTP of an answer: its pieces and the whole."""

from typing import Literal

from pydantic import Field

from kvkeep_service.api.views import CONTEXT_EXAMPLE, Time, View, utc
from kvkeep_service.ports import AnswerEvent, CacheSource, FinishReason, QueryTimings


class CachedTokens(View):
    """Tokens that were not read again."""

    cached_tokens: int
    """Tokens of the prompt that came from the cache."""


class Usage(View):
    """Tokens of one answer, named as in the OpenAI API."""

    prompt_tokens: int
    """Tokens of document and question together."""
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


class AnswerView(View):
    """One answer. The two lists of token ids are there only when they were asked for."""

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
        )

    def to_json(self) -> str:
        """Render, without the lists nobody asked for."""
        unasked = {
            name for name in ("prompt_token_ids", "token_ids") if getattr(self, name) is None
        }
        return self.model_dump_json(exclude=unasked)


class TokenView(View):
    """A piece of an answer; the joined pieces are the whole."""

    text: str
    """Whole characters of the answer."""
    index: int
    """Number of the piece, counted from 0."""


def _ids(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else list(ids)
