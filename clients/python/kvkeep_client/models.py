"""What the server answers with, as frozen values.

``received`` keeps an object as it was sent, for fields that this release has no name for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Final, Literal

from kvkeep_client.fidelity import Fidelity, read_fidelity
from kvkeep_client.fields import Fields


class Unset(Enum):
    """The type of UNSET: "leave it as it is", where None already means "none"."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


@dataclass(frozen=True, slots=True)
class ExpiresAfter:
    """Expiry ``seconds`` after the context was created, or last used."""

    seconds: int
    anchor: Literal["created_at", "last_used_at"] = "last_used_at"


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far a build is; ``fraction`` is of the whole build, from 0 to 1."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Lengths in tokens.

    ``total`` is the document with the text in front of it; ``protected`` tokens are never evicted,
    the text in front included.
    """

    document: int
    protected: int
    total: int


@dataclass(frozen=True, slots=True)
class Compression:
    """How the cache was compressed. Ratios are fractions kept; sizes are in bytes.

    ``tokens`` were asked for instead of a ratio, and ``ratio`` is what they came to; or None.
    With ``max_loss``, in nats per token, the ratio is found by the build, and None until then.
    ``ratio_achieved`` and ``stored_bytes`` are None until the cache is built; they are those of the
    stored cache, which may be shared with a context that asked for more than ``ratio``.
    ``remainder``: whether a few rows of each head stand for those that were evicted.
    """

    policy: str
    policy_applied: str
    ratio: float | None
    ratio_achieved: float | None
    ratios_available: tuple[float, ...]
    scoring: str
    quantization: str
    full_bytes: int
    stored_bytes: int | None
    tokens: int | None
    max_loss: float | None = None
    remainder: bool = False


@dataclass(frozen=True, slots=True)
class BuildError:
    """Why a build failed."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A context as the server last described it."""

    id: str
    name: str | None
    metadata: Mapping[str, str]
    model: str
    status: str
    progress: BuildProgress | None
    created_at: datetime
    ready_at: datetime | None
    last_used_at: datetime | None
    expires_at: datetime | None
    tokens: TokenCounts
    compression: Compression
    timings: Mapping[str, float]
    queries: int
    error: BuildError | None
    received: Mapping[str, object] = field(repr=False, compare=False)
    fidelity: Fidelity | None = None

    @property
    def is_ready(self) -> bool:
        """Whether questions can be asked."""
        return self.status == "ready"

    @property
    def is_settled(self) -> bool:
        """Whether waiting changes nothing: ready, failed or expired."""
        return self.status in {"ready", "failed", "expired"}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; ``cached_tokens`` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerTimings:
    """Where the time of an answer went, in milliseconds; decoding in tokens per second."""

    queue_ms: float
    load_ms: float
    source: str
    prefill_ms: float
    ttft_ms: float
    decode_tps: float


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token and the natural logarithm of its probability, before any sampling option."""

    token: str
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(TokenChance):
    """A token of an answer, and the likeliest ones in its place."""

    top: tuple[TokenChance, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ``ratio`` is the fraction of the cache that was read.

    Token ids and logprobs are there when they were asked for, with ``return_token_ids`` and
    ``logprobs``.
    """

    id: str
    context_id: str
    model: str
    created_at: datetime
    answer: str
    finish_reason: str
    usage: Usage
    timings: AnswerTimings
    ratio: float
    prompt_token_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None
    logprobs: tuple[TokenLogprob, ...] | None
    received: Mapping[str, object] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ContextPage:
    """One page of a listing; ``last_id`` is where the next one starts."""

    contexts: tuple[ContextInfo, ...]
    last_id: str | None
    has_more: bool


def read_context(fields: Fields) -> ContextInfo:
    """Read a context object. Raises: UnexpectedResponse, naming the field."""
    metadata, timings = fields.inner("metadata"), fields.inner("timings")
    tokens = fields.inner("tokens")
    return ContextInfo(
        id=fields.text("id"),
        name=fields.text_or_none("name"),
        metadata={key: metadata.text(key) for key in metadata.values},
        model=fields.text("model"),
        status=fields.text("status"),
        progress=_read_progress(fields.inner_or_none("progress")),
        created_at=fields.time("created_at"),
        ready_at=fields.time_or_none("ready_at"),
        last_used_at=fields.time_or_none("last_used_at"),
        expires_at=fields.time_or_none("expires_at"),
        tokens=TokenCounts(
            document=tokens.integer("document"),
            protected=tokens.integer("protected"),
            total=tokens.integer("total"),
        ),
        compression=_read_compression(fields.inner("compression")),
        timings={key: timings.number(key) for key in timings.values},
        queries=fields.integer("queries"),
        error=_read_error(fields.inner_or_none("error")),
        received=fields.values,
        fidelity=read_fidelity(fields.inner_or_none("fidelity")),
    )


def _read_progress(fields: Fields | None) -> BuildProgress | None:
    if fields is None:
        return None
    return BuildProgress(stage=fields.text("stage"), fraction=fields.number("fraction"))


def _read_error(fields: Fields | None) -> BuildError | None:
    if fields is None:
        return None
    return BuildError(code=fields.text("code"), detail=fields.text("detail"))


def _read_compression(fields: Fields) -> Compression:
    return Compression(
        policy=fields.text("policy"),
        policy_applied=fields.text("policy_applied"),
        ratio=fields.number_or_none("ratio"),
        ratio_achieved=fields.number_or_none("ratio_achieved"),
        ratios_available=fields.numbers("ratios_available"),
        scoring=fields.text("scoring"),
        quantization=fields.text("quantization"),
        full_bytes=fields.integer("full_bytes"),
        stored_bytes=fields.integer_or_none("stored_bytes"),
        tokens=fields.integer_or_none("tokens"),
        max_loss=fields.number_or_none("max_loss"),
        remainder=fields.flag("remainder"),
    )


def read_answer(fields: Fields) -> Answer:
    """Read an answer object. Raises: UnexpectedResponse, naming the field."""
    usage, timings = fields.inner("usage"), fields.inner("timings")
    return Answer(
        id=fields.text("id"),
        context_id=fields.text("context_id"),
        model=fields.text("model"),
        created_at=fields.time("created_at"),
        answer=fields.text("answer"),
        finish_reason=fields.text("finish_reason"),
        usage=Usage(
            prompt_tokens=usage.integer("prompt_tokens"),
            completion_tokens=usage.integer("completion_tokens"),
            total_tokens=usage.integer("total_tokens"),
            cached_tokens=usage.inner("prompt_tokens_details").integer("cached_tokens"),
        ),
        timings=AnswerTimings(
            queue_ms=timings.number("queue_ms"),
            load_ms=timings.number("load_ms"),
            source=timings.text("source"),
            prefill_ms=timings.number("prefill_ms"),
            ttft_ms=timings.number("ttft_ms"),
            decode_tps=timings.number("decode_tps"),
        ),
        ratio=fields.number("ratio"),
        prompt_token_ids=fields.integers_or_none("prompt_token_ids"),
        token_ids=fields.integers_or_none("token_ids"),
        logprobs=_read_logprobs(fields),
        received=fields.values,
    )


def read_answers(fields: Fields) -> tuple[Answer, ...]:
    """Read the answers to several questions. Raises: UnexpectedResponse, naming the field."""
    return tuple(map(read_answer, fields.inners("data")))


def _read_logprobs(fields: Fields) -> tuple[TokenLogprob, ...] | None:
    if fields.values.get("logprobs") is None:
        return None
    return tuple(
        TokenLogprob(
            token.text("token"),
            token.integer("token_id"),
            token.number("logprob"),
            tuple(
                TokenChance(one.text("token"), one.integer("token_id"), one.number("logprob"))
                for one in token.inners("top_logprobs")
            ),
        )
        for token in fields.inners("logprobs")
    )


def read_page(fields: Fields) -> ContextPage:
    """Read one page of a listing. Raises: UnexpectedResponse, naming the field."""
    return ContextPage(
        contexts=tuple(read_context(item) for item in fields.inners("data")),
        last_id=fields.text_or_none("last_id"),
        has_more=fields.flag("has_more"),
    )
