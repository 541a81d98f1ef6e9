"""Conversations of the SDK: each question goes on from the last answer that was whole."""

import pytest

from kvkeep_client import Context, KVKeep, SessionGone, Unavailable

from .stand_in import StandIn


@pytest.fixture
def context(kv: KVKeep) -> Context:
    return kv.contexts.create("some words").wait()


def sent(server: StandIn) -> list[tuple[object, object]]:
    """Session and fork of every question that was asked."""
    bodies = [seen.body or {} for seen in server.calls("POST") if seen.path.endswith("/query")]
    return [(body.get("session"), body.get("fork")) for body in bodies]


def test_every_question_goes_on_from_the_answer_before(server: StandIn, context: Context) -> None:
    chat = context.session()
    assert chat.answer_id is None
    answers = [chat.ask("When?"), chat.ask("And then?")]
    stream = chat.stream("Why?")
    assert list(stream) == server.pieces
    assert chat.answer_id == stream.answer.id
    chat.ask("Who?")
    ids = [None, answers[0].id, answers[1].id, stream.answer.id]
    assert [session for session, _ in sent(server)] == ids
    assert {fork for _, fork in sent(server)[1:]} == {False}


def test_a_fork_and_its_origin_both_go_on(server: StandIn, context: Context) -> None:
    chat = context.session()
    first = chat.ask("When?")
    other = chat.fork()
    one, two = chat.ask("Who?"), other.ask("Where?")
    chat.ask("Why?")
    assert sent(server)[1:] == [(first.id, True), (first.id, True), (one.id, False)]
    assert other.answer_id == two.id
    with pytest.raises(ValueError, match="nothing to go on from"):
        context.session().fork()


def test_a_session_goes_on_from_any_answer(server: StandIn, context: Context) -> None:
    answer = context.query("When?")
    context.session(answer).ask("Why?")
    later = context.query("When?")
    context.session(later.id).ask("Why?")
    assert [session for session, _ in sent(server)] == [None, answer.id, None, later.id]


def test_what_the_server_has_forgotten_is_an_error_that_names_it(
    server: StandIn, context: Context
) -> None:
    chat = context.session()
    chat.ask("When?")
    server.kept.clear()
    with pytest.raises(SessionGone) as gone:
        chat.ask("Why?")
    assert (gone.value.status, gone.value.code, gone.value.reason) == (
        410,
        "session_gone",
        "expired",
    )
    assert gone.value.facts["session"] == chat.answer_id


def test_an_answer_that_broke_off_is_not_gone_on_from(server: StandIn, context: Context) -> None:
    chat = context.session()
    first = chat.ask("When?")
    server.stream_ends_with = "error"
    with pytest.raises(Unavailable):
        list(chat.stream("Why?"))
    assert chat.answer_id == first.id


def test_several_questions_come_back_in_order(server: StandIn, context: Context) -> None:
    answers = context.query_many(["When?", "Who?"], max_tokens=5)
    assert [answer.id for answer in answers] == server.kept_ever
    body = server.calls("POST")[-1].body
    assert body == {"questions": ["When?", "Who?"], "max_tokens": 5}


def test_a_conversation_may_be_asked_and_streamed(server: StandIn, context: Context) -> None:
    context.query([{"role": "user", "content": "When?"}])
    list(context.stream([{"role": "user", "content": "When?"}]))
    for seen in server.calls("POST")[-2:]:
        assert (seen.body or {})["messages"] == [{"role": "user", "content": "When?"}]
        assert "question" not in (seen.body or {})


def test_logprobs_are_read(context: Context) -> None:
    assert context.query("When?").logprobs is None
    logprobs = context.query("When?", logprobs=True, top_logprobs=1).logprobs
    assert logprobs is not None
    assert (logprobs[0].token, logprobs[0].token_id, logprobs[0].logprob) == ("On", 4, -0.25)
    assert [(one.token, one.logprob) for one in logprobs[0].top] == [("At", -0.125)]
