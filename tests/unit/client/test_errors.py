import pytest

from kvkeep_client import errors
from kvkeep_client.errors import APIError, KVKeepError, Problem, TooLarge, error_for


def problem(status: int, code: str, **facts: object) -> Problem:
    return Problem(status, code, "a sentence", "req_1", None, facts)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (422, "invalid_request", "InvalidRequest"),
        (422, "invalid_encoding", "InvalidEncoding"),
        (422, "empty_document", "EmptyDocument"),
        (422, "template_changes_prefix", "TemplateChangesPrefix"),
        (422, "idempotency_mismatch", "IdempotencyMismatch"),
        (413, "document_too_long", "DocumentTooLong"),
        (413, "question_too_long", "QuestionTooLong"),
        (413, "body_too_large", "BodyTooLarge"),
        (401, "unauthenticated", "Unauthenticated"),
        (403, "forbidden", "Forbidden"),
        (404, "context_not_found", "ContextNotFound"),
        (404, "model_not_found", "ModelNotFound"),
        (409, "context_not_ready", "ContextNotReady"),
        (409, "context_failed", "ContextFailed"),
        (409, "context_model_mismatch", "ContextModelMismatch"),
        (409, "head_scores_missing", "HeadScoresMissing"),
        (409, "build_mismatch", "BuildMismatch"),
        (409, "idempotency_in_flight", "IdempotencyInFlight"),
        (410, "context_expired", "ContextExpired"),
        (429, "rate_limited", "RateLimited"),
        (429, "quota_exceeded", "QuotaExceeded"),
        (500, "internal", "ServerFault"),
        (500, "answer_failed", "AnswerFailed"),
        (500, "logits_not_finite", "LogitsNotFinite"),
        (503, "overloaded", "Unavailable"),
        (503, "metadata_unavailable", "Unavailable"),
        (503, "storage_unavailable", "Unavailable"),
        (503, "worker_unavailable", "Unavailable"),
        (507, "storage_full", "StorageFull"),
    ],
    ids=lambda value: str(value),
)
def test_every_code_of_the_contract_has_its_class(status: int, code: str, expected: str) -> None:
    error = error_for(problem(status, code))
    assert type(error).__name__ == expected
    assert (error.status, error.code, error.request_id) == (status, code, "req_1")
    assert str(error) == error.detail == "a sentence"


def test_a_code_of_a_newer_server_is_known_by_its_status() -> None:
    assert type(error_for(problem(409, "invented_later"))) is errors.Conflict
    assert type(error_for(problem(418, "invented_later"))) is APIError


def test_a_limit_in_tokens_is_readable() -> None:
    error = error_for(problem(413, "document_too_long", tokens=9000, max_tokens=7936))
    assert isinstance(error, TooLarge)
    assert (error.tokens, error.max_tokens) == (9000, 7936)


def test_a_limit_in_bytes_claims_no_tokens() -> None:
    error = error_for(problem(413, "body_too_large", limit_bytes=10))
    assert isinstance(error, TooLarge)
    assert (error.tokens, error.max_tokens) == (None, None)


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: list[tuple[str, str]] = []
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        text = line.lstrip("│ ├└─")
        name = text.split("  ")[0]
        if not hasattr(errors, name):
            continue
        depth = (len(line) - len(text)) // 4
        path[depth:] = [name]
        if depth:
            drawn.append((path[depth - 1], name))
    real = [
        (kind.__bases__[0].__name__, name)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, KVKeepError) and kind is not KVKeepError
    ]
    assert sorted(drawn) == sorted(real)
