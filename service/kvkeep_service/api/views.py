"""What goes out over HTTP: the context, the answer and the lists, as the contract writes them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PlainSerializer

from kvkeep_service.ports import AnswerEvent, CacheSource, DocumentSpec, FinishReason, QueryTimings
from kvkeep_storage.records import UNFINISHED, ContextRecord, Page, Status

CONTEXT_EXAMPLE = "ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PX"


def rfc3339(moment: datetime) -> str:
    """Write a time of UTC with milliseconds: ``2026-11-29T15:12:07.123Z``."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[datetime, PlainSerializer(rfc3339, return_type=str)]


class Progress(BaseModel):
    """How far a build is. ``fraction`` is of the stage, 0 to 1."""

    stage: str = Field(examples=["scoring"])
    fraction: float


class Tokens(BaseModel):
    """Lengths in tokens; ``total`` is what every question is asked after."""

    document: int
    protected: int
    total: int


class CompressionView(BaseModel):
    """What was asked for, and what was done."""

    policy: str
    policy_applied: str = Field(description='"none" when the document was too short to evict.')
    ratio: float
    ratio_achieved: float | None
    ratios_available: list[float]
    scoring: str
    quantization: str
    full_bytes: int
    stored_bytes: int | None


class ErrorView(BaseModel):
    """Why a build failed."""

    code: str
    detail: str


class ContextView(BaseModel):
    """A registered document and the state of its cache."""

    id: str = Field(examples=[CONTEXT_EXAMPLE])
    object: Literal["context"] = "context"
    name: str | None
    metadata: dict[str, str]
    model: str
    status: Status
    progress: Progress | None
    created_at: Time
    ready_at: Time | None
    last_used_at: Time | None
    expires_at: Time | None
    tokens: Tokens
    compression: CompressionView
    fidelity: None = Field(default=None, description="Not measured by this version.")
    timings: dict[str, float]
    queries: int
    error: ErrorView | None

    @classmethod
    def of(cls, record: ContextRecord) -> "ContextView":
        """Show a record; a build that has not begun is at fraction 0 of its status."""
        progress = None
        if record.status in UNFINISHED:
            progress = Progress(stage=record.stage or record.status, fraction=record.fraction)
        error = None
        if record.error_code is not None:
            error = ErrorView(code=record.error_code, detail=record.error_detail or "")
        return cls(
            id=record.id,
            name=record.name,
            metadata=dict(record.metadata),
            model=record.model,
            status=record.status,
            progress=progress,
            created_at=_time(record.created_at),
            ready_at=_time_or_none(record.ready_at),
            last_used_at=_time_or_none(record.last_used_at),
            expires_at=_time_or_none(record.expires_at),
            tokens=Tokens(
                document=record.tokens_document,
                protected=record.tokens_protected,
                total=record.tokens_total,
            ),
            compression=CompressionView(
                policy=record.policy,
                policy_applied=record.policy_applied,
                ratio=record.ratio,
                ratio_achieved=record.ratio_achieved,
                ratios_available=list(record.ratios_available),
                scoring=record.scoring,
                quantization=record.quantization,
                full_bytes=record.full_bytes,
                stored_bytes=record.stored_bytes,
            ),
            timings=dict(record.timings),
            queries=record.queries,
            error=error,
        )


class ContextList(BaseModel):
    """One page of contexts."""

    object: Literal["list"] = "list"
    data: list[ContextView]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, page: Page) -> "ContextList":
        """Show a page; ``last_id`` is what the next page comes ``after``."""
        data = [ContextView.of(record) for record in page.records]
        return cls(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=page.has_more,
        )


class SpanView(BaseModel):
    """Half-open range of characters of the document."""

    start: int
    end: int


class DocumentView(BaseModel):
    """The document as it was read: several documents are one text here."""

    object: Literal["document"] = "document"
    context_id: str = Field(examples=[CONTEXT_EXAMPLE])
    document: str
    system: str | None
    instructions: str | None
    protect: list[SpanView]

    @classmethod
    def of(cls, context_id: str, document: DocumentSpec) -> "DocumentView":
        """Show a document."""
        return cls(
            context_id=context_id,
            document=document.text,
            system=document.system,
            instructions=document.instructions,
            protect=[SpanView(start=span.start, end=span.end) for span in document.protect],
        )


class CachedTokens(BaseModel):
    """Tokens that were not read again."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one answer, named as in the OpenAI API."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TimingsView(BaseModel):
    """Where the time of an answer went."""

    queue_ms: float
    load_ms: float
    source: CacheSource
    prefill_ms: float
    ttft_ms: float
    decode_tps: float

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


class AnswerView(BaseModel):
    """One answer. The two lists of token ids are there only when they were asked for."""

    id: str = Field(examples=["ans_01K9Z3V5J8Q6W2E4R7T1Y0N5PX"])
    object: Literal["answer"] = "answer"
    context_id: str = Field(examples=[CONTEXT_EXAMPLE])
    model: str
    created_at: Time
    answer: str = Field(examples=["On 31 March 2029."])
    finish_reason: FinishReason
    usage: Usage
    timings: TimingsView
    ratio: float
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None

    @classmethod
    def of(
        cls, answer_id: str, context_id: str, model: str, created_at: float, answer: AnswerEvent
    ) -> "AnswerView":
        """Show an answer."""
        return cls(
            id=answer_id,
            context_id=context_id,
            model=model,
            created_at=_time(created_at),
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


class TokenView(BaseModel):
    """A piece of an answer; the joined pieces are the whole."""

    text: str
    index: int


class ModelView(BaseModel):
    """A model this server answers for, as the OpenAI API lists it."""

    id: str
    object: Literal["model"] = "model"
    owned_by: Literal["kvkeep"] = "kvkeep"


class ModelList(BaseModel):
    """The one model of this server."""

    object: Literal["list"] = "list"
    data: list[ModelView]


class VersionView(BaseModel):
    """What runs here: everything "auto" was resolved to."""

    version: str
    model: str
    architecture: str
    device: str
    dtype: str
    max_document_tokens: int
    kernels: str
    weights_digest: str
    packages: Mapping[str, str]


class HealthView(BaseModel):
    """Whether the server can take requests, and what is missing if not.

    ``degraded``: it answers, but its two stores do not belong together: reindex.
    """

    status: Literal["ok", "degraded", "unavailable"]
    checks: Mapping[str, Literal["ok", "degraded", "unavailable"]]


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _time_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else _time(seconds)


def _ids(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else list(ids)
