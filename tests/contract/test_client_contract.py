"""The client and the server, held against each other without starting either.

The SDK's unit tests run against a stand-in. Here the stand-in's objects are put through the
server's own types, so that it cannot drift away from what the server says.
"""

import json
from typing import get_args

import pytest

from kvkeep_client import APIError, ExpiresAfter, calls
from kvkeep_client.errors import Problem, error_for
from kvkeep_client.fields import Fields
from kvkeep_client.models import read_answer, read_context, read_page
from kvkeep_service.api.answer_views import AnswerList, AnswerView
from kvkeep_service.api.errors import CATALOGUE
from kvkeep_service.api.query_schemas import Query
from kvkeep_service.api.schemas import ContextCreate, ContextPatch
from kvkeep_service.api.views import ContextList, ContextView

from ..unit.client.stand_in import StandIn, answer_object, context_object, logprobs_object


@pytest.mark.parametrize("status", ["queued", "ready", "failed"])
def test_the_stand_in_shows_contexts_as_the_server_does(status: str) -> None:
    server = StandIn(contexts={"ctx": context_object(1, {"document": "some words"})})
    server.finish("ctx", status)
    shown = server.contexts["ctx"]
    view = ContextView.model_validate(shown)
    assert json.loads(view.model_dump_json()) == shown


def test_the_stand_in_answers_as_the_server_does() -> None:
    answer = answer_object("ctx_1", "On 31 March 2029.")
    assert json.loads(AnswerView.model_validate(answer).to_json()) == answer
    ids = {"prompt_token_ids": [1], "token_ids": [2]}
    assert json.loads(AnswerView.model_validate(answer | ids).to_json()) == answer | ids
    told = answer | {"logprobs": logprobs_object()}
    assert json.loads(AnswerView.model_validate(told).to_json()) == told
    answers = {"object": "list", "data": [answer, told]}
    assert json.loads(AnswerList.model_validate(answers).to_json()) == answers


def test_the_client_reads_what_the_server_shows() -> None:
    view = ContextView.model_validate(context_object(1, {"document": "some words"}))
    page = ContextList(data=[view], first_id=view.id, last_id=view.id, has_more=False)
    assert read_context(Fields(json.loads(view.model_dump_json()), "context")).id == view.id
    assert read_page(Fields(json.loads(page.model_dump_json()), "list")).last_id == view.id
    answer = AnswerView.model_validate(answer_object("ctx_1", "Yes."))
    assert read_answer(Fields(json.loads(answer.to_json()), "answer")).answer == "Yes."


def test_the_server_takes_every_option_that_the_client_offers() -> None:
    call = calls.create_context(
        "some words",
        idempotency_key="key",
        name="Lease",
        metadata={"matter": "1"},
        system="Be brief.",
        instructions="Read this:",
        protect=[(0, 4)],
        ratio="auto",
        max_loss=0.1,
        tokens=None,
        policy="kvzip",
        scoring="exact",
        allow_lossy=True,
        quantization="int8",
        normalization="kvzip_plus",
        neighbours=0,
        remainder=False,
        expires_after=ExpiresAfter(60),
    )
    assert calls.CreateOptions.__annotations__.keys() - _sent(call) == {
        "ratio",
        "max_loss",
        "tokens",
        "policy",
        "scoring",
        "allow_lossy",
        "quantization",
        "normalization",
        "neighbours",
        "remainder",
    }
    ContextCreate.model_validate_json(call.body or b"")

    call = calls.query(
        "ctx_1",
        "When?",
        stream=False,
        system="Be brief.",
        ratio=0.1,
        min_ratio=0.05,
        allow_lossy=True,
        max_tokens=16,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        stop=["\n"],
        logprobs=True,
        top_logprobs=3,
        return_token_ids=True,
        chat_template_kwargs={"enable_thinking": True},
    )
    assert calls.QueryOptions.__annotations__.keys() <= _sent(call)
    Query.model_validate_json(call.body or b"").asked()

    call = calls.query_many("ctx_1", ["When?", "Who?"], max_tokens=16)
    assert len(Query.model_validate_json(call.body or b"").asked()) == 2
    talk: list[calls.Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
    ]
    call = calls.query("ctx_1", talk, stream=True)
    assert Query.model_validate_json(call.body or b"").asked()[0].system == "Be brief."
    earlier = calls.Continued("ans_01K9Z3V5J8Q6W2E4R7T1Y0N5PX", fork=True)
    call = calls.query("ctx_1", "When?", stream=False, continued=earlier)
    sent = Query.model_validate_json(call.body or b"")
    assert (sent.session, sent.fork, len(sent.asked())) == (earlier.answer_id, True, 1)

    call = calls.update_context("ctx_1", name=None, metadata={}, expires_after=None)
    ContextPatch.model_validate_json(call.body or b"")


def test_the_expiry_anchors_are_the_servers() -> None:
    for anchor in get_args(ExpiresAfter.__annotations__["anchor"]):
        call = calls.update_context(
            "ctx_1", name=None, metadata={}, expires_after=ExpiresAfter(60, anchor)
        )
        ContextPatch.model_validate_json(call.body or b"")


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_code_of_the_server_has_a_class_in_the_client(code: str) -> None:
    error = error_for(Problem(CATALOGUE[code].status, code, "a sentence", None, None, {}))
    assert type(error) is not APIError


def _sent(call: calls.Call) -> set[str]:
    return set(json.loads(call.body or b"{}"))
