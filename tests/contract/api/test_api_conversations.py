"""Several questions at once, conversations, sessions and logprobs over HTTP."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from kvkeep_service.ports import Turn

from ...support.api_server import ApiServer
from ...support.scripted_worker import CONTINUED, PIECES
from .answers import events_of, problem

ANSWER = "".join(PIECES)
USER, ASSISTANT, SYSTEM = ({"role": role} for role in ("user", "assistant", "system"))
TALK = [
    USER | {"content": "When?"},
    ASSISTANT | {"content": "Never."},
    USER | {"content": "Why?"},
]


@pytest.fixture(scope="module")
def context(shared_server: ApiServer) -> dict[str, Any]:
    return shared_server.create()


Ask = Callable[..., httpx2.Response]


@pytest.fixture
def ask(api: ApiServer, context: dict[str, Any]) -> Ask:
    def send(**fields: object) -> httpx2.Response:
        return api.client.post(f"/contexts/{context['id']}/query", json=fields)

    return send


def test_several_questions_are_answered_in_their_order(api: ApiServer, ask: Ask) -> None:
    questions = [f"question {number}" for number in range(64)]
    body = ask(questions=questions, system="Be brief.", seed=1).json()
    assert list(body) == ["object", "data"]
    assert body["object"] == "list"
    assert [answer["answer"] for answer in body["data"]] == [ANSWER] * 64
    requests = api.worker.last_requests
    assert [request.question for request in requests] == questions
    assert {request.system for request in requests} == {"Be brief."}
    assert [answer["id"] for answer in body["data"]] == [one.answer_id for one in requests]
    assert len({answer["id"] for answer in body["data"]}) == 64


def test_a_list_of_one_question_comes_back_as_a_list(ask: Ask) -> None:
    assert len(ask(questions=["when?"]).json()["data"]) == 1


def test_pieces_of_several_answers_name_their_question(ask: Ask) -> None:
    events = events_of(ask(questions=["a", "b", "c"], stream=True).text)
    assert [name for name, _ in events] == ["token"] * (3 * len(PIECES)) + ["done"]
    for number in range(3):
        pieces = [data for _, data in events[:-1] if data["question"] == number]
        assert [piece["index"] for piece in pieces] == list(range(len(PIECES)))
        assert "".join(piece["text"] for piece in pieces) == ANSWER
    assert [answer["answer"] for answer in events[-1][1]["data"]] == [ANSWER] * 3


def test_pieces_of_one_answer_name_none(ask: Ask) -> None:
    events = events_of(ask(question="when?", stream=True).text)
    assert set(events[0][1]) == {"text", "index"}


@pytest.mark.parametrize("stream", [False, True])
def test_one_question_that_is_refused_refuses_all(ask: Ask, stream: bool) -> None:
    response = ask(questions=["when?", "is too long", "why?"], stream=stream)
    assert (response.status_code, problem(response)["code"]) == (413, "question_too_long")


def test_one_answer_that_breaks_off_ends_all(ask: Ask) -> None:
    response = ask(questions=["when?", "is lost on the way"])
    assert (response.status_code, problem(response)["code"]) == (503, "storage_unavailable")
    events = events_of(ask(questions=["when?", "is lost on the way"], stream=True).text)
    assert [name for name, _ in events][-1] == "error"
    assert events[-1][1]["code"] == "storage_unavailable"
    assert "done" not in [name for name, _ in events]


def test_going_away_stops_all_questions(api: ApiServer, context: dict[str, Any]) -> None:
    body = b'{"questions": ["when?", "never ends"], "stream": true}'
    head = (
        f"POST /contexts/{context['id']}/query HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(100)
        assert api.worker.running == 1
    deadline = time.monotonic() + 20
    while api.worker.running and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert api.worker.running == 0


def test_a_conversation_reaches_the_worker_in_turns(api: ApiServer, ask: Ask) -> None:
    assert ask(messages=[SYSTEM | {"content": "Be brief."}, *TALK]).status_code == 200
    (request,) = api.worker.last_requests
    assert request.question == "Why?"
    assert request.history == (Turn("user", "When?"), Turn("assistant", "Never."))
    assert request.system == "Be brief."
    ask(messages=TALK, system="Be long.")
    assert api.worker.last_requests[0].system == "Be long."


def test_a_session_reaches_the_worker(api: ApiServer, ask: Ask) -> None:
    assert ask(question="and then?", session=CONTINUED).status_code == 200
    assert (api.worker.last_requests[0].session, api.worker.last_requests[0].fork) == (
        CONTINUED,
        False,
    )
    assert ask(questions=["a", "b"], session=CONTINUED, fork=True).status_code == 200
    assert {(one.session, one.fork) for one in api.worker.last_requests} == {(CONTINUED, True)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_is_gone_is_named_with_the_reason(ask: Ask, stream: bool) -> None:
    other = CONTINUED[:-1] + "Z"
    response = ask(question="and then?", session=other, stream=stream)
    body = problem(response)
    assert (response.status_code, body["code"]) == (410, "session_gone")
    assert (body["session"], body["reason"]) == (other, "expired")


def test_logprobs_come_when_they_are_asked_for(ask: Ask) -> None:
    answer = ask(question="when?", logprobs=True, top_logprobs=2).json()
    assert answer["logprobs"][1] == {
        "token": PIECES[1],
        "token_id": 1,
        "logprob": -1.5,
        "top_logprobs": [
            {"token": PIECES[0], "token_id": 0, "logprob": -0.5},
            {"token": PIECES[1], "token_id": 1, "logprob": -1.5},
        ],
    }
    assert len(answer["logprobs"]) == len(PIECES)
    assert ask(question="when?", logprobs=True).json()["logprobs"][0]["top_logprobs"] == []
    assert "logprobs" not in ask(question="when?").json()
    many = ask(questions=["a"], logprobs=True, stream=True)
    assert "logprobs" in events_of(many.text)[-1][1]["data"][0]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "question"),
        ({"question": "a", "questions": ["b"]}, "questions"),
        ({"question": "a", "messages": TALK}, "messages"),
        ({"questions": ["a"], "messages": TALK}, "messages"),
        ({"questions": []}, "questions"),
        ({"questions": ["a"] * 65}, "questions"),
        ({"questions": ["a", " \n"]}, "questions.1"),
        ({"questions": ["a", 7]}, "questions.1"),
        ({"questions": "a"}, "questions"),
        ({"messages": []}, "messages"),
        ({"messages": [USER | {"content": "a"}, ASSISTANT | {"content": "b"}] * 65}, "messages"),
        ({"messages": TALK[:2]}, "messages"),
        ({"messages": TALK[1:]}, "messages.0.role"),
        ({"messages": [TALK[0], TALK[0]]}, "messages.1.role"),
        ({"messages": [*TALK, SYSTEM | {"content": "x"}]}, "messages.3.role"),
        ({"messages": [SYSTEM | {"content": "x"}]}, "messages"),
        ({"messages": [SYSTEM | {"content": " "}, *TALK]}, "messages.0.content"),
        ({"messages": [*TALK[:2], USER | {"content": " "}]}, "messages.2.content"),
        ({"messages": [SYSTEM | {"content": "x"}, *TALK], "system": "y"}, "system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [USER]}, "messages.0.content"),
        ({"messages": [USER | {"content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [USER | {"content": "x", "name": "y"}]}, "messages.0.name"),
        ({"question": "a", "logprobs": 1}, "logprobs"),
        ({"question": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"question": "a", "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"question": "a", "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"question": "a", "fork": True}, "fork"),
        ({"question": "a", "session": CONTINUED, "fork": 1}, "fork"),
        ({"question": "a", "session": "ans_1"}, "session"),
        ({"question": "a", "session": f"{CONTINUED}\n"}, "session"),
        ({"question": "a", "session": 5}, "session"),
        ({"question": "a", "session": CONTINUED, "ratio": 0.3}, "ratio"),
        ({"question": "a", "session": CONTINUED, "min_ratio": 0.2}, "min_ratio"),
        ({"messages": TALK, "session": CONTINUED}, "messages"),
        ({"questions": ["a"], "session": CONTINUED}, "questions"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(
    ask: Ask, fields: dict[str, object], field: str
) -> None:
    response = ask(**fields)
    body = problem(response)
    assert (response.status_code, body["code"]) == (422, "invalid_request")
    assert body["errors"][0]["field"] == field


@pytest.mark.parametrize(
    "content",
    [b'{"questions": ["\\ud800"]}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}'],
    ids=["questions", "messages"],
)
def test_a_lone_surrogate_is_no_text(
    api: ApiServer, context: dict[str, Any], content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    path = f"/contexts/{context['id']}/query"
    response = api.client.post(path, content=content, headers=headers)
    assert (response.status_code, problem(response)["code"]) == (422, "invalid_encoding")
