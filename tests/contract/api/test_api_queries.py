"""``POST /contexts/{id}/query``: whole and streamed, refused, broken off and abandoned."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from kvkeep_service.ports import QueryRequest

from ...support.api_server import ApiServer
from ...support.scripted_worker import PIECES
from .answers import UNKNOWN, events_of, numbered, problem

ANSWER = "".join(PIECES)


@pytest.fixture(scope="module")
def context(shared_server: ApiServer) -> dict[str, Any]:
    return shared_server.create()


@pytest.fixture
def ask(api: ApiServer, context: dict[str, Any]) -> Callable[..., httpx2.Response]:
    def send(question: str | None = "when?", **fields: object) -> httpx2.Response:
        body = {"question": question, **fields}
        return api.client.post(f"/contexts/{context['id']}/query", json=body)

    return send


Ask = Callable[..., httpx2.Response]


def settled(condition: Callable[[], bool]) -> bool:
    """Wait for what another thread will make true, within a generous bound."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return condition()


def test_an_answer_has_the_members_of_the_contract(ask: Ask, context: dict[str, Any]) -> None:
    response = ask()
    assert response.status_code == 200
    answer = response.json()
    assert answer.pop("id").startswith("ans_")
    assert answer.pop("created_at").endswith("Z")
    assert answer == {
        "object": "answer",
        "context_id": context["id"],
        "model": "scripted",
        "answer": ANSWER,
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 48,
            "completion_tokens": 5,
            "total_tokens": 53,
            "prompt_tokens_details": {"cached_tokens": 40},
        },
        "timings": {
            "queue_ms": 1.0,
            "load_ms": 2.0,
            "source": "resident",
            "prefill_ms": 3.0,
            "ttft_ms": 6.0,
            "decode_tps": 70.0,
        },
        "ratio": 0.3,
    }


def test_every_option_reaches_the_worker(api: ApiServer, ask: Ask, context: dict[str, Any]) -> None:
    answer = ask(
        system="Be brief.",
        ratio=0.2,
        min_ratio=0.15,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop=["\n", "END"],
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        chat_template_kwargs={"enable_thinking": False, "nested": {"a": [1, None]}},
    )
    cache_id = api.run(api.registry.context("default", context["id"])).cache_id
    (request,) = api.worker.last_requests
    assert request.answer_id == answer.json()["id"]
    assert request == QueryRequest(
        tenant="default",
        context_id=context["id"],
        cache_id=cache_id,
        ratio=0.2,
        question="when?",
        min_ratio=0.15,
        system="Be brief.",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=3,
        stop=("\n", "END"),
        return_token_ids=True,
        chat_template_kwargs={"enable_thinking": False, "nested": {"a": [1, None]}},
        answer_id=request.answer_id,
        top_logprobs=2,
    )


def test_token_ids_come_when_they_are_asked_for(ask: Ask) -> None:
    answer = ask(return_token_ids=True).json()
    assert answer["prompt_token_ids"] == list(range(48))
    assert answer["token_ids"] == list(range(5))


def test_field_50_a_stream_joins_to_the_whole_answer(ask: Ask) -> None:
    response = ask(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = events_of(response.text)
    assert [name for name, _ in events] == ["token"] * len(PIECES) + ["done"]
    assert [data["index"] for _, data in events[:-1]] == list(range(len(PIECES)))
    assert "".join(data["text"] for _, data in events[:-1]) == ANSWER
    done = events[-1][1]
    assert (done["object"], done["answer"]) == ("answer", ANSWER)
    assert "token_ids" not in done


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("question", "status", "code"),
    [
        ("is too long", 413, "question_too_long"),
        ("comes too often", 503, "overloaded"),
        ("changes the prefix", 422, "template_changes_prefix"),
        ("finds a damaged cache", 409, "context_not_ready"),
        ("breaks at once", 500, "internal"),
    ],
)
def test_what_fails_before_the_first_token_has_a_status(
    ask: Ask, question: str, status: int, code: str, stream: bool
) -> None:
    response = ask(question, stream=stream)
    body = problem(response)
    assert (response.status_code, body["code"]) == (status, code)
    assert "secret" not in response.text


def test_field_51_a_question_over_the_limit_is_refused_with_both_numbers(ask: Ask) -> None:
    body = problem(ask("is too long"))
    assert (body["tokens"], body["max_tokens"]) == (2000, 900)


def test_an_overloaded_server_says_when_to_come_back(ask: Ask) -> None:
    assert ask("comes too often").headers["retry-after"] == "3"


@pytest.mark.parametrize("question", [None, "", "  \n"])
def test_field_52_an_empty_question_is_refused(ask: Ask, question: str | None) -> None:
    response = ask(question)
    assert response.status_code == 422
    assert problem(response)["errors"][0]["field"] == "question"


def test_a_ratio_that_is_not_stored_is_refused_naming_those_that_are(ask: Ask) -> None:
    body = problem(ask(ratio=0.22))
    assert body["errors"][0]["field"] == "ratio"
    assert "0.05, 0.1, 0.15, 0.2, 0.3" in body["detail"]
    assert problem(ask(ratio=0.4))["errors"][0]["field"] == "ratio"


def test_the_least_that_will_do_is_a_stored_ratio_that_is_not_above_the_other(ask: Ask) -> None:
    for fields in ({"min_ratio": 0.22}, {"ratio": 0.2, "min_ratio": 0.3}):
        body = problem(ask(**fields))
        assert body["code"] == "invalid_request"
        assert body["errors"][0]["field"] == "min_ratio"
    assert "allow_lossy" in problem(ask(min_ratio=0.1))["detail"]
    assert ask(min_ratio=0.1, allow_lossy=True).status_code == 200


def test_a_lossy_ratio_is_asked_for_twice(ask: Ask) -> None:
    assert "allow_lossy" in problem(ask(ratio=0.1))["detail"]
    assert ask(ratio=0.1, allow_lossy=True).json()["ratio"] == 0.1


def test_a_refused_query_is_no_use_of_the_context(
    api: ApiServer, ask: Ask, context: dict[str, Any]
) -> None:
    before = api.client.get(f"/contexts/{context['id']}").json()
    ask(ratio=0.22)
    ask("")
    assert api.client.get(f"/contexts/{context['id']}").json() == before


def test_an_unknown_context_is_not_found(api: ApiServer) -> None:
    for context_id in (UNKNOWN, "ctx_1"):
        response = api.client.post(f"/contexts/{context_id}/query", json={"question": "when?"})
        assert (response.status_code, problem(response)["code"]) == (404, "context_not_found")


def test_field_46_a_context_that_is_not_ready_says_when_to_come_back(api: ApiServer) -> None:
    api.hold_builds()
    made = api.client.post("/contexts", json={"document": numbered(1)}).json()
    path = f"/contexts/{made['id']}/query"
    response = api.client.post(path, json={"question": "when?"})
    body = problem(response)
    assert (response.status_code, body["code"]) == (409, "context_not_ready")
    assert body["status_of_context"] == "queued"
    assert int(response.headers["retry-after"]) > 0
    api.release_builds()
    assert api.client.post(f"{path}?wait=30", json={"question": "when?"}).status_code == 200


def test_a_failed_context_answers_with_its_error(api: ApiServer) -> None:
    api.worker.fail_next_build = True
    made = api.client.post("/contexts?wait=30", json={"document": numbered(2)}).json()
    response = api.client.post(f"/contexts/{made['id']}/query", json={"question": "when?"})
    body = problem(response)
    assert (response.status_code, body["code"]) == (409, "context_failed")
    assert (body["error_code"], body["error_detail"]) == (
        "document_corrupt",
        "the document is damaged",
    )


# --- what breaks off ---------------------------------------------------------------------------


def test_a_fault_after_the_first_token_is_the_last_event(ask: Ask) -> None:
    response = ask("breaks", stream=True)
    events = events_of(response.text)
    assert [name for name, _ in events] == ["token", "token", "error"]
    assert events[-1][1]["code"] == "internal"
    assert events[-1][1]["request_id"] == response.headers["x-request-id"]
    assert "secret" not in response.text


def test_a_fault_of_the_stores_after_the_first_token_keeps_its_code(ask: Ask) -> None:
    events = events_of(ask("is lost on the way", stream=True).text)
    assert events[-1][1]["code"] == "storage_unavailable"
    assert ask("is lost on the way").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_field_48_a_client_that_goes_away_stops_the_generation(
    api: ApiServer, context: dict[str, Any], stream: bool
) -> None:
    closed = api.worker.closed
    body = b'{"question": "never ends", "stream": %s}' % (b"true" if stream else b"false")
    head = (
        f"POST /contexts/{context['id']}/query HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        if stream:
            assert b"200 OK" in connection.recv(100)
        assert settled(lambda: api.worker.running == 1)
    assert settled(lambda: api.worker.running == 0)
    assert api.worker.closed == closed + 1


def test_a_client_that_stops_reading_a_stream_stops_the_generation(
    api: ApiServer, context: dict[str, Any]
) -> None:
    body = {"question": "never ends", "stream": True}
    path = f"/contexts/{context['id']}/query"
    with api.client.stream("POST", path, json=body) as stream:
        pieces = stream.iter_text()
        next(pieces)
        assert api.worker.running == 1
    assert settled(lambda: api.worker.running == 0)


def test_an_answer_that_was_read_to_its_end_closes_the_worker(api: ApiServer, ask: Ask) -> None:
    closed = api.worker.closed
    ask()
    ask(stream=True)
    assert api.worker.closed == closed + 2
    assert api.worker.running == 0
