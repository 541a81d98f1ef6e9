"""Everything a request can fail with on the service side; ``start_errors.py`` has the start's.

    ServiceError                 one request fails
    ├── Invalid                  fix the request
    │   ├── InvalidRequest
    │   ├── InvalidEncoding
    │   ├── EmptyDocument
    │   ├── DocumentTooLong
    │   ├── QuestionTooLong
    │   ├── BodyTooLarge *
    │   ├── UnsupportedMediaType *
    │   ├── TemplateChangesPrefix
    │   └── IdempotencyMismatch
    ├── Unauthenticated *
    ├── Forbidden *
    ├── Missing                  not there, or no longer
    │   ├── ModelNotFound
    │   ├── ContextNotFound
    │   ├── ContextExpired
    │   └── SessionGone
    ├── Unsuitable               there, in a state that forbids this
    │   ├── ContextNotReady
    │   ├── ContextFailed
    │   ├── ContextModelMismatch
    │   ├── HeadScoresMissing
    │   ├── BuildMismatch
    │   └── IdempotencyInFlight
    └── Busy                     try again later
        ├── RecordsForeign
        ├── QuotaExceeded
        ├── Overloaded
        ├── MemoryShort
        └── WorkerUnavailable

An asterisk: in ``api/refusals.py``. What computing an answer fails with, which is of no such kind,
is in ``answer_failures.py``. Statuses and titles are in ``api/errors.py``. No message
carries text of a document, a question or an answer.
"""

from collections.abc import Mapping
from typing import ClassVar

Fact = str | int | float | bool | None


class ServiceError(Exception):
    """A request failed. ``facts`` are the extra members of the problem body."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, **facts: Fact) -> None:
        """Keep the sentence for people and the fields for programs."""
        super().__init__(detail)
        self.detail = detail
        self.facts: Mapping[str, Fact] = facts


class Invalid(ServiceError):
    """The request itself is wrong and fails again unchanged."""

    code = "invalid_request"


class InvalidRequest(Invalid):
    """A field has a value that cannot be accepted. ``field`` is its dotted path."""

    def __init__(self, field: str, reason: str) -> None:
        """Name the field and the limit it breaks."""
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class InvalidEncoding(Invalid):
    """Text that is not valid Unicode: bad UTF-8 bytes or a lone surrogate."""

    code = "invalid_encoding"

    def __init__(self, field: str, reason: str) -> None:
        """Name the field ("body" when no field can be told) and what is wrong in it."""
        super().__init__(f"{field}: {reason}", field=field)
        self.field = field


class EmptyDocument(Invalid):
    """The document has no character other than white space."""

    code = "empty_document"

    def __init__(self, field: str) -> None:
        """Name the field it was sent in: "document" or "documents"."""
        super().__init__("the document is empty or only white space", field=field)


class DocumentTooLong(Invalid):
    """The document, with what surrounds it, does not fit the model's positions."""

    code = "document_too_long"

    def __init__(self, tokens: int, max_tokens: int) -> None:
        """Both in tokens: what was counted, and the most that is accepted."""
        told = f"the document has {tokens} tokens; at most {max_tokens} are accepted"
        super().__init__(told, field="document", tokens=tokens, max_tokens=max_tokens)
        self.tokens = tokens
        self.max_tokens = max_tokens


class QuestionTooLong(Invalid):
    """The question does not fit the positions that the document leaves."""

    code = "question_too_long"

    def __init__(self, tokens: int, max_tokens: int, question: int | None = None) -> None:
        """Both in tokens: what was counted, and the most that is accepted.

        ``question``: its number among several, from 0.
        """
        number = {} if question is None else {"question": question}
        told = f"the question has {tokens} tokens; at most {max_tokens} fit after this document"
        super().__init__(told, tokens=tokens, max_tokens=max_tokens, **number)
        self.tokens = tokens
        self.max_tokens = max_tokens


class TemplateChangesPrefix(Invalid):
    """The chat template renders another document prefix with these query options.

    The stored cache belongs to the prefix it was built from, so the query is refused.
    """

    code = "template_changes_prefix"

    def __init__(self, field: str) -> None:
        """Name the option that changed the prefix."""
        super().__init__(
            f"{field}: the chat template changes the text before the question with this value",
            field=field,
        )
        self.field = field


class IdempotencyMismatch(Invalid):
    """An idempotency key comes back with another body."""

    code = "idempotency_mismatch"

    def __init__(self) -> None:
        """The key is the caller's; it is not repeated."""
        super().__init__("this Idempotency-Key was used with another body")


class Missing(ServiceError):
    """What the request names is not there."""

    code = "not_found"


class ModelNotFound(Missing):
    """Another model than the served one was asked for."""

    code = "model_not_found"

    def __init__(self, model: str, served: str) -> None:
        """Name both models."""
        told = f"model {model!r} is not served here; {served!r} is"
        super().__init__(told, field="model", served=served)


class ContextNotFound(Missing):
    """No such context for this tenant; another tenant's looks exactly the same."""

    code = "context_not_found"

    def __init__(self, context_id: str) -> None:
        """Name the id that was asked for."""
        super().__init__(f"there is no context {context_id!r}")


class ContextExpired(Missing):
    """The context passed its expiry."""

    code = "context_expired"

    def __init__(self, context_id: str, expired_at: str) -> None:
        """``expired_at`` is RFC 3339 in UTC."""
        super().__init__(f"context {context_id!r} expired at {expired_at}", expired_at=expired_at)


class SessionGone(Missing):
    """An answer cannot be continued: what was kept of its conversation is not there, or no more.

    ``reason`` is one of "unknown" (never here, another context's, forgotten, or another
    process's), "continued" (and that one again), "expired", "evicted" and "cache_replaced".
    """

    code = "session_gone"

    def __init__(self, session: str, reason: str) -> None:
        """Name the answer, and why it cannot be continued."""
        super().__init__(
            f"answer {session!r} cannot be continued here: {reason}; ask with the whole"
            " conversation as messages",
            session=session,
            reason=reason,
        )
        self.reason = reason


class Unsuitable(ServiceError):
    """The thing is there, and its state forbids this request."""

    code = "conflict"


class ContextNotReady(Unsuitable):
    """The cache of the context is still being built, or rebuilt."""

    code = "context_not_ready"
    retryable = True

    def __init__(self, context_id: str, status: str, retry_after_seconds: int = 2) -> None:
        """Name the status and when asking again makes sense."""
        super().__init__(f"context {context_id!r} is {status}", status_of_context=status)
        self.retry_after_seconds = retry_after_seconds


class ContextFailed(Unsuitable):
    """The build of the context failed for good."""

    code = "context_failed"

    def __init__(self, context_id: str, error_code: str, error_detail: str) -> None:
        """Carry the error the build ended with."""
        told = f"context {context_id!r} failed: {error_detail}"
        super().__init__(told, error_code=error_code, error_detail=error_detail)


class ContextModelMismatch(Unsuitable):
    """The context was registered for another model than this server's."""

    code = "context_model_mismatch"

    def __init__(self, context_id: str, model: str, served: str) -> None:
        """Name both models."""
        told = f"context {context_id!r} belongs to model {model!r}; this server has {served!r}"
        super().__init__(told, model=model, served=served)


class HeadScoresMissing(Unsuitable):
    """Whole heads were to be evicted, and nobody has measured those of the served model."""

    code = "head_scores_missing"

    def __init__(self) -> None:
        """Name the command that measures them."""
        super().__init__(
            'policy "kvzip_head" needs head scores of the served model: run'
            " kvkeep-server calibrate FILE with a text like your documents, and restart the server"
        )


class BuildMismatch(Unsuitable):
    """This server can never build what was registered: it would come out as another cache."""

    code = "build_mismatch"

    def __init__(self, reason: str, other_builders: int | None = None) -> None:
        """Say what differs, and how many other servers take builds, where that is known."""
        known = {} if other_builders is None else {"other_builders": other_builders}
        super().__init__(reason, **known)


class IdempotencyInFlight(Unsuitable):
    """The first request with this idempotency key has not been answered yet."""

    code = "idempotency_in_flight"
    retryable = True

    def __init__(self, retry_after_seconds: int = 1) -> None:
        """Say when asking again makes sense."""
        super().__init__("the first request with this Idempotency-Key is still running")
        self.retry_after_seconds = retry_after_seconds


class Busy(ServiceError):
    """The server cannot take this request now."""

    code = "unavailable"
    retryable = True
    retry_after_seconds: int = 1


class RecordsForeign(Busy):
    """Redis was flushed, or is another one: what exists is not known there."""

    code = "metadata_unavailable"
    retry_after_seconds = 30

    def __init__(self) -> None:
        """Take nothing: it is no fact about what was asked for."""
        super().__init__(
            "the records in Redis do not belong to this object store, so what is missing there may"
            " exist; they must be restored: kvkeep-server admin reindex"
        )


class QuotaExceeded(Busy):
    """The tenant has as much as it may have; nothing of the request is kept."""

    code = "quota_exceeded"

    def __init__(
        self, quota: str, limit: int, used: int, asked: int, retry_after_seconds: int
    ) -> None:
        """Name the quota ("contexts", "queued" or "bytes"), and all three in its unit."""
        detail = f"the quota of {quota} is {limit}; {used} are used, {asked} more were asked for"
        super().__init__(detail, quota=quota, limit=limit, used=used, asked=asked)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(Busy):
    """As many queries wait as may wait, or as many caches are prefetched as may be."""

    code = "overloaded"

    def __init__(
        self, max_queue: int, retry_after_seconds: int = 1, *, what: str = "queries are waiting"
    ) -> None:
        """Name the limit, and what it is on."""
        super().__init__(f"{max_queue} {what} already", max_queue=max_queue)
        self.max_queue = max_queue
        self.retry_after_seconds = retry_after_seconds


class MemoryShort(Busy):
    """The memory of the engine is in use by others, or ran out."""

    code = "overloaded"


class WorkerUnavailable(Busy):
    """The worker is starting, draining, or has died."""

    code = "worker_unavailable"

    def __init__(self, reason: str, retry_after_seconds: int = 5) -> None:
        """Say what the worker is doing instead."""
        super().__init__(f"the worker cannot answer: {reason}")
        self.retry_after_seconds = retry_after_seconds
