from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from starlette.responses import HTMLResponse, JSONResponse, Response

from kvkeep_client import (
    APIError,
    ContextNotFound,
    InvalidRequest,
    KVKeep,
    KVKeepError,
    QuotaExceeded,
    ServerFault,
    ServerUnreachable,
    TimedOut,
    Unauthenticated,
    Unavailable,
    UnexpectedResponse,
)
from kvkeep_client.calls import Call
from kvkeep_client.transport import Transport

from ...support.servers import silence, unused_url
from .conftest import Served, Unhurried
from .stand_in import StandIn, problem


def overloaded(**headers: str) -> Response:
    return problem(503, "overloaded", headers=headers, max_queue=64)


def test_a_passing_failure_is_retried_and_the_caller_never_sees_it(
    server: StandIn, unhurried: Unhurried
) -> None:
    server.planned = [overloaded(), overloaded()]
    context = unhurried.contexts.create("some words")
    assert context.status == "queued"
    first, second = unhurried.pauses
    assert 0.25 <= first <= 0.5
    assert 0.5 <= second <= 1.0


def test_the_same_key_goes_with_every_attempt(server: StandIn, unhurried: Unhurried) -> None:
    server.planned = [overloaded(), overloaded()]
    unhurried.contexts.create("some words")
    keys = [request.headers["idempotency-key"] for request in server.calls("POST")]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert len(server.contexts) == 1


def test_two_documents_never_share_a_key(server: StandIn, unhurried: Unhurried) -> None:
    unhurried.contexts.create("some words")
    unhurried.contexts.create("some words")
    assert len(server.contexts) == 2


def test_a_registration_that_is_still_running_is_asked_for_again(
    server: StandIn, unhurried: Unhurried
) -> None:
    server.planned = [problem(409, "idempotency_in_flight", headers={"Retry-After": "1"})]
    assert unhurried.contexts.create("some words").status == "queued"
    assert unhurried.pauses == [1.0]


def test_after_two_retries_the_failure_is_raised(server: StandIn, unhurried: Unhurried) -> None:
    server.planned = [overloaded() for _ in range(3)]
    with pytest.raises(Unavailable) as caught:
        unhurried.contexts.get("ctx_1")
    assert caught.value.code == "overloaded"
    assert len(server.seen) == 3


def test_the_server_says_how_long_to_pause(server: StandIn, unhurried: Unhurried) -> None:
    server.planned = [overloaded(**{"Retry-After": "7"})]
    unhurried.contexts.create("some words")
    assert unhurried.pauses == [7.0]


def test_the_server_may_say_until_when_to_pause(server: StandIn, unhurried: Unhurried) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=30)
    server.planned = [overloaded(**{"Retry-After": format_datetime(moment, usegmt=True)})]
    unhurried.contexts.create("some words")
    [pause] = unhurried.pauses
    assert 8 < pause <= 30


def test_a_pause_that_cannot_be_read_is_the_usual_one(
    server: StandIn, unhurried: Unhurried
) -> None:
    server.planned = [overloaded(**{"Retry-After": "soon"})]
    unhurried.contexts.create("some words")
    [pause] = unhurried.pauses
    assert 0.25 <= pause <= 0.5


def test_a_pause_of_an_hour_is_reported_instead(server: StandIn, unhurried: Unhurried) -> None:
    server.planned = [overloaded(**{"Retry-After": "3600"})]
    with pytest.raises(Unavailable) as caught:
        unhurried.contexts.get("ctx_1")
    assert caught.value.retry_after_seconds == 3600
    assert unhurried.pauses == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            problem(422, "invalid_request", errors=[{"field": "name", "reason": "long"}]),
            InvalidRequest,
        ),
        (problem(429, "quota_exceeded"), QuotaExceeded),
        (problem(500, "internal"), ServerFault),
        (problem(404, "context_not_found"), ContextNotFound),
    ],
    ids=["invalid", "quota", "fault", "missing"],
)
def test_what_stays_wrong_is_not_repeated(
    server: StandIn, unhurried: Unhurried, answer: Response, error: type[KVKeepError]
) -> None:
    server.planned = [answer]
    with pytest.raises(error):
        unhurried.contexts.get("ctx_1")
    assert len(server.seen) == 1


def test_an_error_carries_everything_the_server_said(server: StandIn, unhurried: Unhurried) -> None:
    errors = [{"field": "compression.ratio", "reason": "1.5 is outside 0.05 to 1.0"}]
    server.planned = [problem(422, "invalid_request", detail="no", errors=errors)]
    with pytest.raises(InvalidRequest) as caught:
        unhurried.contexts.get("ctx_1")
    error = caught.value
    assert (error.status, error.code, error.detail) == (422, "invalid_request", "no")
    assert error.request_id == "req_of_the_body"
    assert error.facts == {"errors": errors}


def test_a_refusal_without_a_problem_body_still_has_status_and_request_id(
    server: StandIn, unhurried: Unhurried
) -> None:
    server.planned = [HTMLResponse("<h1>Teapot</h1>", 418)]
    with pytest.raises(APIError) as caught:
        unhurried.contexts.get("ctx_1")
    assert (caught.value.status, caught.value.code) == (418, "http_418")
    assert caught.value.request_id == "req_of_the_header"


def test_a_gateway_that_finds_no_server_is_retried(server: StandIn, unhurried: Unhurried) -> None:
    server.planned = [HTMLResponse("<h1>Bad Gateway</h1>", 502)]
    assert unhurried.contexts.create("some words").status == "queued"


@pytest.mark.parametrize(
    "answer", [HTMLResponse("<h1>Welcome</h1>"), JSONResponse([1]), JSONResponse({"id": "x"})]
)
def test_an_answer_that_is_not_kvkeeps_is_named_as_such(
    server: StandIn, unhurried: Unhurried, answer: Response
) -> None:
    server.planned = [answer]
    with pytest.raises(UnexpectedResponse):
        unhurried.contexts.get("ctx_1")


def test_a_server_that_is_not_there_is_tried_three_times() -> None:
    url, pauses = unused_url(), list[float]()
    transport = Transport(url, None, timeout_seconds=5, max_retries=2, sleep=pauses.append)
    with pytest.raises(ServerUnreachable) as caught:
        transport.fields(Call("GET", "/contexts"))
    transport.close()
    assert len(pauses) == 2
    assert url in caught.value.detail
    assert (caught.value.code, caught.value.status) == ("unreachable", None)


def test_a_silent_server_is_not_waited_for_forever_and_not_asked_twice() -> None:
    pauses: list[float] = []
    with silence() as url:
        transport = Transport(url, None, timeout_seconds=0.05, max_retries=2, sleep=pauses.append)
        with pytest.raises(TimedOut) as caught:
            transport.fields(Call("GET", "/contexts"))
        transport.close()
    assert caught.value.code == "timeout"
    assert pauses == []


def test_the_key_is_sent_as_a_bearer_token(served: Served) -> None:
    served.server.api_key = "secret-1"
    with KVKeep(served.url, api_key="secret-1") as kv:
        assert list(kv.contexts.list()) == []
    with KVKeep(served.url, api_key="other") as kv, pytest.raises(Unauthenticated):
        kv.contexts.get("ctx_1")


def test_url_and_key_come_from_the_environment(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.server.api_key = "secret-1"
    monkeypatch.setenv("KVKEEP_URL", served.url + "/")
    monkeypatch.setenv("KVKEEP_API_KEY", "secret-1")
    with KVKeep() as kv:
        assert kv.url == served.url
        assert list(kv.contexts.list()) == []


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "file:///etc"])
def test_a_url_of_another_kind_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="http://"):
        KVKeep(url)


def test_a_server_behind_a_path_is_reached(served: Served) -> None:
    with KVKeep(f"{served.url}/kv/") as kv, pytest.raises(KVKeepError):
        kv.contexts.get("ctx_1")
    assert served.server.seen[0].path == "/kv/contexts/ctx_1"
