"""What goes out over HTTP of a context: itself, its list and its document."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from kvkeep_service.ports import DocumentSpec
from kvkeep_storage.records import UNFINISHED, ContextRecord, Page, Status

CONTEXT_EXAMPLE = "ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PX"


def rfc3339(moment: datetime) -> str:
    """Write a time of UTC with milliseconds: ``2026-11-29T15:12:07.123Z``."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(seconds: float) -> datetime:
    """Turn seconds since 1970 into a time of UTC."""
    return datetime.fromtimestamp(seconds, UTC)


Time = Annotated[datetime, PlainSerializer(rfc3339, return_type=str)]


class View(BaseModel):
    """What goes out; the line below a field is its description in ``/openapi.json``."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Progress(View):
    """How far a build is. ``fraction`` is of the whole build, 0 to 1."""

    stage: str = Field(examples=["scoring"])
    """What is being done: prefill, scoring, checking, compacting or storing; before, the status."""
    fraction: float
    """Part of the build that is done, 0 to 1."""


class Tokens(View):
    """Lengths in tokens; ``total`` is what every question is asked after."""

    document: int
    """Tokens of the document alone."""
    protected: int
    """Tokens that are never evicted: those before the document, and protected spans."""
    total: int
    """Tokens that every question is asked after: the document and what precedes it."""


class CompressionView(View):
    """What was asked for, and what was done."""

    policy: str
    """The policy asked for."""
    policy_applied: str
    """The policy used; "none" when the document was too short to evict."""
    ratio: float | None
    """Fraction of KV pairs to keep, 0.05 to 1. null: it is still to be found, by `max_loss`."""
    max_loss: float | None
    """Where `ratio` was "auto", what may be lost at most, in nats per token. null: it was not."""
    tokens: int | None
    """Tokens to keep per head on average that were asked for. null: a ratio was."""
    ratio_achieved: float | None
    """Fraction kept in the stored cache, which others may share at more. null: not built yet."""
    ratios_available: list[float]
    """The ratios that a query may name; empty until it is built."""
    scoring: str
    """How KV pairs were scored: "local" or "exact"; "none" where the policy is not "kvzip"."""
    quantization: str
    """How kept KV pairs are stored: "none" (as they are), "int8", "fp8" or "int4"."""
    remainder: bool
    """Whether a few rows of each head stand for those evicted; not at ratio 1."""
    full_bytes: int
    """Size of the KV cache uncompressed, in bytes; of layers with a sliding window, the window."""
    stored_bytes: int | None
    """Size of the cache as stored, in bytes, others' rows included. null: not built yet."""


class RatioFidelityView(View):
    """What reading the cache at one ratio loses."""

    ratio: float
    """The ratio: a query may name it."""
    nll_kept: float
    """As of the whole."""
    top1_agreement: float
    """As of the whole."""
    loss_error: float
    """Standard error of `nll_kept` less `nll_full`, in nats per token."""


class FidelityView(View):
    """What compression lost, measured when the cache was built; docs/fidelity.md explains it."""

    spans: int
    """Pieces of the document that the model was made to repeat."""
    tokens: int
    """Tokens of these that were counted."""
    nll_full: float
    """Loss of a token with the whole cache: mean negative log likelihood, in nats."""
    nll_kept: float | None
    """The same with what the context's own ratio keeps; null when that ratio was not measured."""
    top1_agreement: float | None
    """Share of tokens at which both think the same token most likely, 0 to 1; null likewise."""
    ratios: list[RatioFidelityView]
    """The same at each of the `ratios_available` that was measured, ascending."""

    @classmethod
    def of(cls, record: ContextRecord) -> "FidelityView | None":
        """Show what was measured; None when nothing was, or the ratio is not found yet."""
        fidelity = record.fidelity
        if fidelity is None or record.ratio_from is not None:
            return None
        own = fidelity.at(record.ratio)
        return cls(
            spans=fidelity.spans,
            tokens=fidelity.tokens,
            nll_full=fidelity.nll_full,
            nll_kept=own.nll_kept if own else None,
            top1_agreement=own.top1_agreement if own else None,
            ratios=[
                RatioFidelityView(
                    ratio=item.ratio,
                    nll_kept=item.nll_kept,
                    top1_agreement=item.top1_agreement,
                    loss_error=item.loss_error,
                )
                for item in fidelity.ratios
                if item.ratio in record.ratios_available
            ],
        )


class ErrorView(View):
    """Why a build failed."""

    code: str
    """Stable, for programs."""
    detail: str
    """A sentence for people."""


class ContextView(View):
    """A registered document and the state of its cache."""

    id: str = Field(examples=[CONTEXT_EXAMPLE])
    """Names the context in every path: `ctx_` and 26 characters."""
    object: Literal["context"] = "context"
    """Always "context"."""
    name: str | None
    """The name it was given. null: none."""
    metadata: dict[str, str]
    """The pairs of strings it was given."""
    model: str
    """The model that read it, the only one that can answer from it."""
    status: Status
    """Whether it can be asked: only when it is ready."""
    progress: Progress | None
    """How far the build is. null: none is going on."""
    created_at: Time
    """When it was registered, UTC."""
    ready_at: Time | None
    """When it became ready, UTC. null: it has not yet."""
    last_used_at: Time | None
    """When it was last asked, UTC. null: never."""
    expires_at: Time | None
    """When it expires, UTC. null: never."""
    tokens: Tokens
    """Its lengths, in tokens."""
    compression: CompressionView
    """How its cache is compressed, and what that came to."""
    fidelity: FidelityView | None
    """What compression lost. null: nothing was left out, too short to measure, or not built."""
    timings: dict[str, float]
    """Seconds that each step of the build took, by name, such as `prefill_s`."""
    queries: int
    """Questions it has been asked."""
    error: ErrorView | None
    """Why the build failed. null: it did not."""

    @classmethod
    def of(cls, record: ContextRecord) -> "ContextView":
        """Show a record; a build that has not begun is at fraction 0 of its status."""
        progress = None
        if record.awaits_build:
            waiting = record.status if record.status in UNFINISHED else "queued"
            progress = Progress(stage=record.stage or waiting, fraction=record.fraction)
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
            created_at=utc(record.created_at),
            ready_at=_utc_or_none(record.ready_at),
            last_used_at=_utc_or_none(record.last_used_at),
            expires_at=_utc_or_none(record.expires_at),
            tokens=Tokens(
                document=record.tokens_document,
                protected=record.tokens_protected,
                total=record.tokens_total,
            ),
            compression=CompressionView(
                policy=record.policy,
                policy_applied=record.policy_applied,
                ratio=None if record.ratio_from is not None else record.ratio,
                max_loss=record.max_loss,
                tokens=record.tokens_asked,
                ratio_achieved=record.ratio_achieved,
                ratios_available=list(record.ratios_available),
                # Records name one whatever the policy.
                scoring=record.scoring if record.policy == "kvzip" else "none",
                quantization=record.quantization,
                remainder=record.remainder,
                full_bytes=record.full_bytes,
                stored_bytes=record.stored_bytes,
            ),
            fidelity=FidelityView.of(record),
            timings=dict(record.timings),
            queries=record.queries,
            error=error,
        )


class ContextList(View):
    """One page of contexts."""

    object: Literal["list"] = "list"
    """Always "list"."""
    data: list[ContextView]
    """The contexts of this page, at most `limit`."""
    first_id: str | None
    """Id of the first context here. null: the page is empty."""
    last_id: str | None
    """Id of the last context here, the next page's `after`. null: the page is empty."""
    has_more: bool
    """Whether there is a next page."""

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


class SpanView(View):
    """Half-open range of characters of the document."""

    start: int
    """First character (Unicode code point), counted from 0."""
    end: int
    """One past the last character."""


class DocumentView(View):
    """The document as it was read: several documents are one text here."""

    object: Literal["document"] = "document"
    """Always "document"."""
    context_id: str = Field(examples=[CONTEXT_EXAMPLE])
    """The context it belongs to."""
    document: str
    """The whole text."""
    system: str | None
    """System text before the document. null: none."""
    instructions: str | None
    """Text between system and document. null: none."""
    protect: list[SpanView]
    """Ranges of the document that are never evicted."""

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


def _utc_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else utc(seconds)
