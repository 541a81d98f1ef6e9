import json
from collections.abc import Iterator

import pytest
from starlette.exceptions import HTTPException

from kvkeep_service import answer_failures as answer_failures  # its classes are walked too
from kvkeep_service import errors as service
from kvkeep_service.api.errors import CATALOGUE, MEDIA_TYPE, failure_of, responses
from kvkeep_storage import errors as storage

# What Starlette and FastAPI raise by themselves.
CODES_OF_HTTP = {"bad_request", "method_not_allowed"}


def subclasses(root: type[Exception]) -> Iterator[type[Exception]]:
    yield root
    for child in root.__subclasses__():
        yield from subclasses(child)


ROOTS: list[type[service.ServiceError] | type[storage.StorageError]] = [
    service.ServiceError,
    storage.StorageError,
]
CODES = sorted({kind.code for root in ROOTS for kind in subclasses(root)})  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", CODES)
def test_every_error_has_a_status_and_a_title(code: str) -> None:
    entry = CATALOGUE[code]
    assert 400 <= entry.status < 600
    assert entry.title


def test_the_catalogue_holds_nothing_that_nothing_raises() -> None:
    assert CATALOGUE.keys() - set(CODES) == CODES_OF_HTTP


def test_an_error_that_may_pass_says_when_to_come_back() -> None:
    for root in ROOTS:
        for kind in subclasses(root):
            error = kind.__new__(kind)
            Exception.__init__(error, "about it")
            if isinstance(error, service.ServiceError):
                error.detail, error.facts = "about it", {}
                error.field = error.reason = "x"  # type: ignore[attr-defined]
            failure = failure_of(error)
            assert (failure.retry_after_seconds is not None) == kind.retryable  # type: ignore[attr-defined]


def test_what_storage_says_stays_inside() -> None:
    error = storage.MetadataUnavailable("redis GET", "redis://user:secret@10.0.0.3 refused")
    body = failure_of(error).problem("/contexts", "req_1").decode()
    assert json.loads(body)["code"] == "metadata_unavailable"
    assert "secret" not in body
    assert "10.0.0.3" not in body


def test_an_unforeseen_error_shows_nothing_of_itself() -> None:
    body = failure_of(KeyError("a secret of the document")).problem("/contexts", "req_1")
    assert json.loads(body)["code"] == "internal"
    assert b"secret" not in body


def test_a_problem_has_the_members_of_the_contract() -> None:
    failure = failure_of(service.DocumentTooLong(9000, 7936))
    problem = json.loads(failure.problem("/contexts", "req_1"))
    assert problem == {
        "type": "urn:kvkeep:error:document_too_long",
        "title": "The document is too long",
        "status": 413,
        "detail": "the document has 9000 tokens; at most 7936 are accepted",
        "instance": "/contexts",
        "code": "document_too_long",
        "request_id": "req_1",
        "field": "document",
        "tokens": 9000,
        "max_tokens": 7936,
    }


def test_a_refused_field_is_named() -> None:
    problem = json.loads(
        failure_of(service.InvalidRequest("protect.0.end", "too far")).problem("/", "r")
    )
    assert problem["errors"] == [{"field": "protect.0.end", "reason": "too far"}]


def test_a_lone_surrogate_does_not_break_the_problem_that_names_it() -> None:
    failure = failure_of(service.InvalidRequest("metadata.\ud800", "no"))
    assert b"\\ud800" in failure.response("/contexts", "req_1").body


def test_a_status_nobody_planned_is_internal() -> None:
    assert failure_of(HTTPException(418)).code == "internal"


def test_failures_are_described_for_openapi_by_status() -> None:
    described = responses("context_not_ready", "context_failed", "context_expired")
    assert described.keys() == {409, 410}
    assert "`context_not_ready`, `context_failed`" in described[409]["description"]
    assert MEDIA_TYPE in described[409]["content"]
