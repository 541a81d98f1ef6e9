"""Everything that can go wrong between a program and the service.

KVKeepError                      every error carries code, status, request_id and detail
├── ServerUnreachable            no connection could be made
├── TimedOut                     no answer within the client's own limit
├── StreamInterrupted            the connection broke before the answer was whole
├── UnexpectedResponse           an answer, but not one of kvkeep's (a proxy's page, say)
└── APIError                     the server said no; chosen by ``code``, else by status
    ├── InvalidRequest           400, 405, 415, 422: fix the request
    │   ├── InvalidEncoding
    │   ├── EmptyDocument
    │   ├── TemplateChangesPrefix
    │   └── IdempotencyMismatch
    ├── TooLarge                 413
    │   ├── DocumentTooLong
    │   ├── QuestionTooLong
    │   └── BodyTooLarge
    ├── Unauthenticated          401
    ├── Forbidden                403
    ├── NotFound                 404
    │   ├── ContextNotFound
    │   └── ModelNotFound
    ├── Conflict                 409: there, in a state that forbids this
    │   ├── ContextNotReady
    │   ├── ContextFailed
    │   ├── ContextModelMismatch
    │   ├── HeadScoresMissing
    │   ├── BuildMismatch
    │   └── IdempotencyInFlight
    ├── Gone                     410
    │   ├── ContextExpired
    │   └── SessionGone
    ├── RateLimited              429
    │   └── QuotaExceeded
    ├── ServerFault              500
    │   ├── AnswerFailed
    │   └── LogitsNotFinite
    ├── Unavailable              502, 503, 504: try again later
    └── StorageFull              507
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


class KVKeepError(Exception):
    """A request failed. ``detail`` is one sentence for people; ``code`` is for programs."""

    is_retried: ClassVar[bool] = False
    """Whether the client repeats a request that failed like this."""

    context_id: str | None = None
    """The context that was waited for when this happened."""

    def __init__(
        self, detail: str, *, code: str, status: int | None = None, request_id: str | None = None
    ) -> None:
        """``status`` and ``request_id`` are None when no server answered."""
        super().__init__(detail)
        self.detail = detail
        self.code = code
        self.status = status
        self.request_id = request_id


class ServerUnreachable(KVKeepError):
    """No connection could be made to ``url``."""

    is_retried = True

    def __init__(self, url: str, reason: str) -> None:
        """Name the server's URL and what the network said."""
        super().__init__(f"no kvkeep server answers at {url}: {reason}", code="unreachable")
        self.url = url


class TimedOut(KVKeepError):
    """The client stopped waiting; the server may still be working on the request."""

    def __init__(self, detail: str) -> None:
        """Say what was waited for, and how long."""
        super().__init__(detail, code="timeout")


class StreamInterrupted(KVKeepError):
    """The connection broke after the request was sent and before the answer was whole."""

    is_retried = True

    def __init__(self, reason: str, *, request_id: str | None = None) -> None:
        """Say what the network said."""
        super().__init__(
            f"the answer broke off: {reason}", code="stream_interrupted", request_id=request_id
        )


class UnexpectedResponse(KVKeepError):
    """The answer does not follow kvkeep's contract: another program, or another version."""

    def __init__(
        self, detail: str, *, status: int | None = None, request_id: str | None = None
    ) -> None:
        """Name the field that is missing or of the wrong type."""
        super().__init__(detail, code="unexpected_response", status=status, request_id=request_id)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a refusal says. ``facts`` are the members of the body that have no name here."""

    status: int
    code: str
    detail: str
    request_id: str | None
    retry_after_seconds: float | None
    facts: Mapping[str, object]


class APIError(KVKeepError):
    """The server answered with an error."""

    def __init__(self, problem: Problem) -> None:
        """Take everything from the body and the headers of the answer."""
        super().__init__(
            problem.detail,
            code=problem.code,
            status=problem.status,
            request_id=problem.request_id,
        )
        self.retry_after_seconds = problem.retry_after_seconds
        self.facts = problem.facts


class InvalidRequest(APIError):
    """The request is wrong and fails again unchanged. ``facts["errors"]`` names the fields."""


class InvalidEncoding(InvalidRequest):
    """Text that is not valid Unicode: bad UTF-8 bytes or a lone surrogate."""


class EmptyDocument(InvalidRequest):
    """The document has nothing but white space."""


class TemplateChangesPrefix(InvalidRequest):
    """The query's template options would change the text the cache was built from."""


class IdempotencyMismatch(InvalidRequest):
    """The idempotency key was used before, with another body."""


class TooLarge(APIError):
    """More than the server takes."""

    @property
    def tokens(self) -> int | None:
        """Tokens counted, when the limit is one of tokens."""
        return _integer(self.facts.get("tokens"))

    @property
    def max_tokens(self) -> int | None:
        """The most tokens accepted, when the limit is one of tokens."""
        return _integer(self.facts.get("max_tokens"))


class DocumentTooLong(TooLarge):
    """The document does not fit the model's positions."""


class QuestionTooLong(TooLarge):
    """The question does not fit the positions the document leaves."""


class BodyTooLarge(TooLarge):
    """The request has more bytes than the server reads."""


class Unauthenticated(APIError):
    """No API key, or one the server does not know."""


class Forbidden(APIError):
    """The API key does not allow this."""


class NotFound(APIError):
    """What the request names is not there."""


class ContextNotFound(NotFound):
    """There is no such context for this key."""


class ModelNotFound(NotFound):
    """The server does not serve the model that was asked for."""


class Conflict(APIError):
    """The thing is there, in a state that forbids this request."""


class ContextNotReady(Conflict):
    """The context is still being built: ``wait()`` for it."""


class ContextFailed(Conflict):
    """The build of the context failed for good; ``detail`` says why."""


class ContextModelMismatch(Conflict):
    """The context was registered for another model than the served one."""


class HeadScoresMissing(Conflict):
    """Whole heads were to be evicted, and the served model has not been calibrated."""


class BuildMismatch(Conflict):
    """The server cannot build what was registered; ``detail`` says what it has otherwise."""


class IdempotencyInFlight(Conflict):
    """The first request with this idempotency key is still running."""

    is_retried = True


class Gone(APIError):
    """What the request names was there, and is no longer."""


class ContextExpired(Gone):
    """The context passed its expiry."""


class SessionGone(Gone):
    """The answer cannot be continued any more: ask with the whole conversation as messages."""

    @property
    def reason(self) -> str | None:
        """Why: "unknown", "continued", "expired", "evicted" or "cache_replaced"."""
        reason = self.facts.get("reason")
        return reason if isinstance(reason, str) else None


class RateLimited(APIError):
    """Too many requests for now."""

    is_retried = True


class QuotaExceeded(RateLimited):
    """A quota of this key is used up; asking again soon changes nothing."""

    is_retried = False


class ServerFault(APIError):
    """The server failed; ``request_id`` finds the reason in its log."""


class AnswerFailed(ServerFault):
    """Computing the answer failed; ``facts["error"]`` names the kind of error."""


class LogitsNotFinite(ServerFault):
    """The model gave nothing to pick a token by; ``facts["dtype"]`` is what it runs in."""


class Unavailable(APIError):
    """The server, or a store behind it, cannot take the request now."""

    is_retried = True


class StorageFull(APIError):
    """The server has no room left for another cache."""


_BY_CODE: Mapping[str, type[APIError]] = {
    "invalid_request": InvalidRequest,
    "invalid_encoding": InvalidEncoding,
    "empty_document": EmptyDocument,
    "template_changes_prefix": TemplateChangesPrefix,
    "idempotency_mismatch": IdempotencyMismatch,
    "document_too_long": DocumentTooLong,
    "question_too_long": QuestionTooLong,
    "body_too_large": BodyTooLarge,
    "context_not_found": ContextNotFound,
    "model_not_found": ModelNotFound,
    "context_not_ready": ContextNotReady,
    "context_failed": ContextFailed,
    "context_model_mismatch": ContextModelMismatch,
    "head_scores_missing": HeadScoresMissing,
    "build_mismatch": BuildMismatch,
    "idempotency_in_flight": IdempotencyInFlight,
    "context_expired": ContextExpired,
    "session_gone": SessionGone,
    "quota_exceeded": QuotaExceeded,
    "answer_failed": AnswerFailed,
    "logits_not_finite": LogitsNotFinite,
}
_BY_STATUS: Mapping[int, type[APIError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: InvalidRequest,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    415: InvalidRequest,
    422: InvalidRequest,
    429: RateLimited,
    500: ServerFault,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
    507: StorageFull,
}


def error_for(problem: Problem) -> APIError:
    """Return the exception for a refusal: by its code, else by its status, else APIError."""
    by_status = _BY_STATUS.get(problem.status, APIError)
    return _BY_CODE.get(problem.code, by_status)(problem)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None
