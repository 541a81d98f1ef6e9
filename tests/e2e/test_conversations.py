"""Conversations with the bundled model, through the real server and the SDK."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep_client import Context, KVKeep, Message, SessionGone

from ..support.server import Server, eventually

pytestmark = pytest.mark.e2e

HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook.md"
ASKED = ("How high is the tower?", "Who built it?", "When?")
SHORT = {"max_tokens": 12}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("bundled") / "data", threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def kv(real: Server) -> Iterator[KVKeep]:
    with KVKeep(real.url) as client:
        yield client


@pytest.fixture(scope="module")
def context(kv: KVKeep) -> Context:
    text = HANDBOOK.read_text(encoding="utf-8")[:1400]
    return kv.contexts.create(text, ratio=0.5).wait()


def gauge(server: Server, name: str) -> float:
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"{name} is not shown")


def test_a_session_answers_as_the_whole_conversation_does(context: Context) -> None:
    chat, other = context.session(), None
    said: list[Message] = []
    for question in ASKED:
        said.append({"role": "user", "content": question})
        whole = context.query(said, return_token_ids=True, **SHORT)  # type: ignore[arg-type]  # options
        answer = chat.ask(question, return_token_ids=True, **SHORT)  # type: ignore[arg-type]  # options
        assert answer.token_ids == whole.token_ids
        assert answer.prompt_token_ids == whole.prompt_token_ids
        if len(said) > 1:
            assert answer.usage.cached_tokens > whole.usage.cached_tokens
        said.append({"role": "assistant", "content": answer.answer})
        other = other or chat.fork()
    assert other is not None
    assert other.ask(ASKED[1], max_tokens=12).answer == said[3]["content"]


def test_questions_asked_together_are_answered_as_each_alone(context: Context) -> None:
    answers = context.query_many(ASKED, max_tokens=12, logprobs=True, top_logprobs=2)
    alone = [context.query(question, max_tokens=12).answer for question in ASKED]
    assert [answer.answer for answer in answers] == alone
    for answer in answers:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == answer.usage.completion_tokens
        assert all(token.top[0].token_id == token.token_id for token in answer.logprobs)


def test_a_seed_survives_a_restart_and_a_session_does_not(real: Server, context: Context) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    before = context.query(ASKED[0], **sampled)  # type: ignore[arg-type]  # options
    real.kill()
    real.start()
    with KVKeep(real.url) as client:
        again = client.contexts.get(context.id)
        after = again.query_many([*ASKED[1:], ASKED[0]], **sampled)  # type: ignore[arg-type]  # options
        assert after[-1].answer == before.answer
        with pytest.raises(SessionGone) as gone:
            again.session(before).ask("Why?")
        assert gone.value.reason == "unknown"


def test_a_deleted_context_leaves_no_conversation_in_memory(real: Server) -> None:
    with KVKeep(real.url) as client:
        for context in client.contexts.list():
            context.query(ASKED[0], max_tokens=2)
            assert gauge(real, "kvkeep_sessions") > 0
            context.delete()
    eventually(lambda: not gauge(real, "kvkeep_session_bytes"))
    assert gauge(real, "kvkeep_sessions") == 0
