"""Every way a request can fail, as ``application/problem+json``: one table, one place.

The codes are the contract; clients branch on them, not on titles.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvkeep_service.api.refusals import Unauthenticated
from kvkeep_service.api.strict import DEPTH_MAX, in_words
from kvkeep_service.errors import (
    IdempotencyInFlight,
    InvalidEncoding,
    InvalidRequest,
    ServiceError,
)
from kvkeep_service.metrics import Metrics
from kvkeep_service.telemetry import where
from kvkeep_storage.errors import StorageError

_log = structlog.get_logger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:kvkeep:error:"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one code means over HTTP."""

    status: int
    title: str


CATALOGUE: Final[Mapping[str, Entry]] = {
    "invalid_request": Entry(422, "The request is not valid"),
    "invalid_encoding": Entry(422, "The text is not valid Unicode"),
    "empty_document": Entry(422, "The document is empty"),
    "template_changes_prefix": Entry(422, "The query options change the stored prefix"),
    "idempotency_mismatch": Entry(422, "The idempotency key was used with another body"),
    "document_too_long": Entry(413, "The document is too long"),
    "question_too_long": Entry(413, "The question is too long"),
    "body_too_large": Entry(413, "The request body is too large"),
    "unsupported_media_type": Entry(415, "The media type is not supported"),
    "unauthenticated": Entry(401, "A valid key is needed"),
    "forbidden": Entry(403, "This is not allowed"),
    "not_found": Entry(404, "There is nothing here"),
    "model_not_found": Entry(404, "The model is not served here"),
    "context_not_found": Entry(404, "There is no such context"),
    "method_not_allowed": Entry(405, "The method is not allowed here"),
    "bad_request": Entry(400, "The request cannot be understood"),
    "context_not_ready": Entry(409, "The context is not ready"),
    "context_failed": Entry(409, "The context failed to build"),
    "context_model_mismatch": Entry(409, "The context belongs to another model"),
    "head_scores_missing": Entry(409, "The served model has not been calibrated"),
    "build_mismatch": Entry(409, "This server cannot build what was registered"),
    "idempotency_in_flight": Entry(409, "The first request with this key is still running"),
    "conflict": Entry(409, "The state does not allow this"),
    "lease_lost": Entry(409, "Another process took over"),
    "cache_unreferenced": Entry(409, "The context was deleted meanwhile"),
    "data_directory_locked": Entry(409, "The data directory is in use"),
    "cache_incompatible": Entry(409, "The stored cache is of another version"),
    "document_corrupt": Entry(409, "The stored document is damaged"),
    "context_expired": Entry(410, "The context has expired"),
    "session_gone": Entry(410, "The answer cannot be continued"),
    "gone": Entry(410, "It has expired"),
    "quota_exceeded": Entry(429, "The quota does not allow this"),
    "internal": Entry(500, "Something went wrong here"),
    "answer_failed": Entry(500, "Computing the answer failed"),
    "logits_not_finite": Entry(500, "The model gave no finite logits"),
    "storage_error": Entry(500, "Storage failed"),
    "invalid_value": Entry(500, "Storage refused a value"),
    "cache_corrupt": Entry(500, "The stored cache is damaged"),
    "record_corrupt": Entry(500, "A stored record is damaged"),
    "unavailable": Entry(503, "Try again later"),
    "overloaded": Entry(503, "Too much is asked for at once"),
    "worker_unavailable": Entry(503, "The worker cannot answer"),
    "metadata_unavailable": Entry(503, "The metadata store cannot be reached"),
    "storage_unavailable": Entry(503, "The object store cannot be reached"),
    "store_mismatch": Entry(503, "The stores do not belong together"),
    "storage_full": Entry(507, "No space is left"),
}

_BY_STATUS: Final[Mapping[int, str]] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}
_NO_ROUTE: Final[Mapping[str, str]] = {
    "not_found": "there is no such route; /openapi.json lists all",
    "method_not_allowed": "this route has other methods; /openapi.json lists all",
}


class FieldProblem(BaseModel):
    """One field of a request that was refused."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    field: str = Field(examples=["compression.ratio"])
    """Path of the field, such as `compression.ratio`, or a parameter's name."""
    reason: str
    """What is wrong with it, and what is accepted."""


class Problem(BaseModel):
    """RFC 9457 problem details. Some codes add members, such as ``max_tokens``."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: str = Field(examples=[TYPE_PREFIX + "context_not_found"])
    """A URN with the code."""
    title: str
    """The code in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What went wrong this time, for people."""
    instance: str
    """The path of the request."""
    code: str
    """Stable; `docs/errors.md` lists them all."""
    request_id: str
    """Names the request in the server's log, as `X-Request-Id` does."""
    errors: list[FieldProblem] | None = None
    """With `invalid_request`: the fields that were refused, 20 at most."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, ready to be sent: the code and everything the caller may know about it."""

    code: str
    detail: str
    facts: Mapping[str, str | int | float | bool | None]
    errors: tuple[FieldProblem, ...] = ()
    retry_after_seconds: int | None = None
    headers: Mapping[str, str] | None = None

    def problem(self, path: str, request_id: str) -> bytes:
        """Render the problem body as JSON, in ASCII: a refused lone surrogate may be in it."""
        entry = CATALOGUE[self.code]
        problem = Problem(
            type=TYPE_PREFIX + self.code,
            title=entry.title,
            status=entry.status,
            detail=self.detail,
            instance=path,
            code=self.code,
            request_id=request_id,
            errors=list(self.errors) or None,
            **self.facts,
        )
        members = problem.model_dump()
        if not self.errors:
            del members["errors"]
        return json.dumps(members).encode("ascii")

    def response(self, path: str, request_id: str) -> Response:
        """Render the whole response."""
        headers = dict(self.headers or {})
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(self.retry_after_seconds)
        return Response(
            self.problem(path, request_id),
            status_code=CATALOGUE[self.code].status,
            headers=headers,
            media_type=MEDIA_TYPE,
        )


def failure_of(error: BaseException) -> Failure:
    """Say what a caller may know about an error; anything unforeseen is ``internal``.

    A storage error is reported by its title only: its message may name keys, paths or hosts.
    """
    match error:
        case InvalidRequest():
            problem = FieldProblem(field=error.field, reason=error.reason)
            return Failure(error.code, error.detail, error.facts, (problem,))
        case Unauthenticated():
            challenge = {"WWW-Authenticate": "Bearer"}
            return Failure(error.code, error.detail, error.facts, headers=challenge)
        case ServiceError():
            return Failure(
                error.code, error.detail, error.facts, retry_after_seconds=_retry_after(error)
            )
        case StorageError():
            title = CATALOGUE[error.code].title
            return Failure(error.code, title, {}, retry_after_seconds=_retry_after(error))
        case RequestValidationError():
            return _validation_failure(error)
        case HTTPException():
            return _http_failure(error)
        case _:
            return Failure("internal", CATALOGUE["internal"].title, {})


def install(app: FastAPI) -> None:
    """Answer every error of a route with a problem body. Modifies: the app's handlers."""
    for kind in (ServiceError, StorageError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _handle)


def responses(*codes: str) -> dict[int | str, dict[str, Any]]:
    """Describe failures for OpenAPI, by status; the schema is added by the application."""
    by_status: dict[int | str, list[str]] = {}
    for code in codes:
        by_status.setdefault(CATALOGUE[code].status, []).append(code)
    return {status: _described(status, named) for status, named in by_status.items()}


async def _handle(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    metrics: Metrics = request.app.state.services.metrics
    metrics.problem(failure.code)
    if CATALOGUE[failure.code].status >= 500:
        _log.warning("request_failed", code=failure.code, where=where(error))
    return failure.response(request.url.path, request.state.request_id)


def _retry_after(error: ServiceError | StorageError) -> int | None:
    if not error.retryable:
        return None
    seconds = getattr(error, "retry_after_seconds", 1)
    return int(seconds)


def _validation_failure(error: RequestValidationError) -> Failure:
    items = error.errors()
    for item in items:
        if item["type"] == "json_invalid":
            return failure_of(InvalidRequest("body", _not_json(item, error.body)))
        if item["type"] == "string_unicode":
            return failure_of(InvalidEncoding(_path(item["loc"]), "a lone surrogate is not text"))
    problems = tuple(
        FieldProblem(field=_path(item["loc"]), reason=in_words(item["type"], item["msg"]))
        for item in items
    )
    detail = "; ".join(f"{problem.field}: {problem.reason}" for problem in problems[:3])
    return Failure("invalid_request", detail, {}, problems)


def _not_json(item: Mapping[str, Any], body: object) -> str:
    """Where a body stops being JSON: its parser counts characters, from 0."""
    offset = next((part for part in item["loc"] if isinstance(part, int)), 0)
    before = body[:offset] if isinstance(body, str) else ""
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    # The parser's words name what it expected, and repeat nothing of the body.
    why = str(item["ctx"]["error"]).removesuffix(" at")
    return f"is not JSON at line {line}, column {column} (character {offset}): {why}"


def _http_failure(error: HTTPException) -> Failure:
    # FastAPI answers 400 for whatever goes wrong while it reads the body, and keeps the cause.
    match error.__cause__:
        case ServiceError() as cause:
            return failure_of(cause)
        case UnicodeDecodeError() as cause:
            return failure_of(InvalidEncoding("body", f"byte {cause.start} is not UTF-8"))
        case RecursionError():
            return failure_of(InvalidRequest("body", f"is nested more than {DEPTH_MAX} deep"))
        case ValueError():
            digits = sys.get_int_max_str_digits()
            reason = f"has a number of more than {digits} digits"
            return failure_of(InvalidRequest("body", reason))
    code = _BY_STATUS.get(error.status_code, "internal")
    detail = _NO_ROUTE.get(code, CATALOGUE[code].title)
    return Failure(code, detail, {}, headers=error.headers)


def _path(location: Iterable[int | str]) -> str:
    # The first element says where the field was sent: body, query, path or header.
    where_sent, *path = location
    return ".".join(str(part) for part in path) or str(where_sent)


def _described(status: int | str, codes: list[str]) -> dict[str, Any]:
    description = HTTPStatus(int(status)).phrase + ": " + ", ".join(f"`{code}`" for code in codes)
    reference = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {MEDIA_TYPE: {"schema": reference}}}


# Named for the two lists that most routes share.
COMMON: Final = (
    "unauthenticated",
    "forbidden",
    "invalid_request",
    "metadata_unavailable",
    "internal",
)
BODY: Final = ("invalid_encoding", "body_too_large", "unsupported_media_type")
RETRY_KEY: Final = (IdempotencyInFlight.code, "idempotency_mismatch")
