"""The SDK against the real application: what its unit tests assume of the server is so."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep_client import (
    Context,
    ContextExpired,
    ContextFailed,
    ContextNotFound,
    ContextNotReady,
    DocumentTooLong,
    EmptyDocument,
    ExpiresAfter,
    IdempotencyMismatch,
    InvalidEncoding,
    InvalidRequest,
    KVKeep,
    QuestionTooLong,
    ServerFault,
    TemplateChangesPrefix,
    TimedOut,
    Unauthenticated,
    Unavailable,
)

from ...support.api_server import DOCUMENT, ApiServer, api_server

ANSWER = "It ends on 31 March 2029 — 🙂."


@pytest.fixture
def kv(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVKeep]:
    monkeypatch.delenv("KVKEEP_API_KEY", raising=False)
    with KVKeep(api.url, max_retries=0) as kv:
        yield kv


def test_a_document_is_registered_waited_for_and_asked(kv: KVKeep) -> None:
    context = kv.contexts.create(
        DOCUMENT,
        name="Lease",
        metadata={"matter": "2291"},
        system="Be brief.",
        instructions="Read this:",
        protect=[(0, 4)],
        ratio=0.2,
        scoring="exact",
        expires_after=ExpiresAfter(600),
    ).wait(timeout_seconds=60)
    assert context.info.is_ready
    assert context.info.compression.ratio_achieved == pytest.approx(0.2)
    assert context.info.expires_at is not None
    answer = context.query("When does it end?", return_token_ids=True)
    assert answer.answer == ANSWER
    assert answer.context_id == context.id
    assert answer.usage.cached_tokens == 40
    assert answer.token_ids == (0, 1, 2, 3, 4)
    assert context.refresh().info.queries == 1
    assert context.document() == DOCUMENT


def test_streamed_pieces_equal_the_answer(kv: KVKeep) -> None:
    context = kv.contexts.create(DOCUMENT).wait(timeout_seconds=60)
    stream = context.stream("When does it end?", max_tokens=32, stop=["\n"])
    assert "".join(stream) == ANSWER == stream.answer.answer


def test_a_build_is_followed_while_it_runs(api: ApiServer, kv: KVKeep) -> None:
    api.hold_builds()
    context = kv.contexts.create(f"{DOCUMENT} followed")
    with pytest.raises(ContextNotReady) as caught:
        context.query("When?")
    assert caught.value.retry_after_seconds is not None
    with pytest.raises(TimedOut):
        context.wait(timeout_seconds=0.1)
    seen = []
    for info in context.events(timeout_seconds=60):
        seen.append(info.status)
        api.release_builds()
    assert seen[0] in {"queued", "building"}
    assert seen[-1] == "ready"


def test_a_failed_build_is_told_with_its_reason(api: ApiServer, kv: KVKeep) -> None:
    api.worker.fail_next_build = True
    context = kv.contexts.create(f"{DOCUMENT} to fail")
    with pytest.raises(ContextFailed, match="the document is damaged") as caught:
        context.wait(timeout_seconds=60)
    assert caught.value.facts["error_code"] == "document_corrupt"
    with pytest.raises(ContextFailed):
        context.query("When?")


def test_a_repeated_registration_is_the_first_one(kv: KVKeep) -> None:
    first = kv.contexts.create(DOCUMENT, idempotency_key="sdk-1")
    assert kv.contexts.create(DOCUMENT, idempotency_key="sdk-1").id == first.id
    with pytest.raises(IdempotencyMismatch):
        kv.contexts.create(f"{DOCUMENT} changed", idempotency_key="sdk-1")


def test_contexts_are_listed_and_narrowed(kv: KVKeep) -> None:
    made = [
        kv.contexts.create(DOCUMENT, metadata={"set": "listed & narrowed"}).id for _ in range(3)
    ]
    wanted = {"set": "listed & narrowed"}
    assert [context.id for context in kv.contexts.list(metadata=wanted, order="asc")] == made
    assert [context.id for context in kv.contexts.list(metadata=wanted)] == made[::-1]


def test_a_context_is_changed_and_deleted(kv: KVKeep) -> None:
    context = kv.contexts.create(DOCUMENT, name="Lease", expires_after=ExpiresAfter(600))
    assert context.update(name=None, metadata={"a": "b"}).name is None
    assert context.update(expires_after=None).info.expires_at is None
    assert context.info.metadata == {"a": "b"}
    context.delete()
    context.delete()
    with pytest.raises(ContextNotFound):
        context.refresh()


def test_every_refusal_has_its_class(kv: KVKeep) -> None:
    context = kv.contexts.create(DOCUMENT).wait(timeout_seconds=60)
    with pytest.raises(EmptyDocument):
        kv.contexts.create(" \n")
    with pytest.raises(InvalidEncoding):
        kv.contexts.create("\ud800")
    with pytest.raises(DocumentTooLong) as caught:
        kv.contexts.create("word " * 1001)
    assert (caught.value.tokens, caught.value.max_tokens) == (1001, 1000)
    with pytest.raises(InvalidRequest) as refused:
        kv.contexts.create(DOCUMENT, ratio=7.0)
    assert refused.value.request_id
    assert "compression.ratio" in refused.value.detail
    with pytest.raises(QuestionTooLong):
        context.query("is too long")
    with pytest.raises(TemplateChangesPrefix):
        context.query("changes the prefix")
    with pytest.raises(Unavailable) as busy:
        context.query("comes too often")
    assert (busy.value.code, busy.value.retry_after_seconds) == ("overloaded", 3)
    with pytest.raises(ServerFault):
        context.query("breaks at once")


def test_a_fault_on_the_way_ends_the_stream_with_an_error(kv: KVKeep) -> None:
    context = kv.contexts.create(DOCUMENT).wait(timeout_seconds=60)
    received: list[str] = []
    with pytest.raises(Unavailable) as caught:
        received.extend(context.stream("is lost on the way"))
    assert caught.value.code == "storage_unavailable"
    assert received == ["It ends ", "on 31 March"]


def test_leaving_the_loop_stops_the_generation(api: ApiServer, kv: KVKeep) -> None:
    context = kv.contexts.create(DOCUMENT).wait(timeout_seconds=60)
    closed = api.worker.closed
    for _ in context.stream("never ends"):
        break
    while api.worker.closed == closed:
        # Ends with the test's time limit if the server never notices.
        context.refresh()
    assert api.worker.running == 0


def test_an_expired_context_is_gone(kv: KVKeep) -> None:
    context = kv.contexts.create(DOCUMENT, expires_after=ExpiresAfter(1, "created_at"))
    with pytest.raises(ContextExpired):
        ask_for_ever(context)


def test_without_its_key_a_locked_server_says_so(tmp_path: Path) -> None:
    with api_server(tmp_path, api_key="secret-1") as server:
        with KVKeep(server.url) as kv, pytest.raises(Unauthenticated):
            kv.contexts.get("ctx_1")
        with KVKeep(server.url, api_key="secret-1") as kv:
            assert list(kv.contexts.list()) == []


def test_the_command_does_it_all(api: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "lease.txt").write_text(f"{DOCUMENT} from a file", encoding="utf-8")

    def run(*arguments: str) -> str:
        command = [str(Path(sys.executable).parent / "kvkeep"), *arguments, "--url", api.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    context_id = run("put", str(tmp_path / "lease.txt")).strip()
    assert run("ask", context_id, "When does it end?") == f"{ANSWER}\n"
    assert context_id in run("ls")
    assert "lease.txt" in run("show", context_id)
    run("rm", context_id)
    assert context_id not in run("ls")


def ask_for_ever(context: Context) -> None:
    while True:
        context.wait(timeout_seconds=60).query("When?")
