import sys
from pathlib import Path

import pytest

from kvkeep_client import (
    UNSET,
    ContextExpired,
    ContextFailed,
    ContextNotFound,
    ContextNotReady,
    EmptyDocument,
    ExpiresAfter,
    InvalidEncoding,
    KVKeep,
    TimedOut,
)

from .conftest import Unhurried
from .stand_in import StandIn, problem


def test_only_what_was_said_is_sent(server: StandIn, kv: KVKeep) -> None:
    kv.contexts.create(document="some words")
    assert server.seen[0].body == {"document": "some words"}


def test_every_option_goes_where_the_contract_wants_it(server: StandIn, kv: KVKeep) -> None:
    kv.contexts.create(
        "some words",
        name="Lease",
        metadata={"matter": "2291"},
        system="Be brief.",
        instructions="Read this:",
        protect=[(0, 4)],
        ratio=0.1,
        tokens=None,
        policy="kvzip",
        scoring="exact",
        allow_lossy=True,
        expires_after=ExpiresAfter(seconds=60),
        idempotency_key="mine",
    )
    assert server.seen[0].headers["idempotency-key"] == "mine"
    assert server.seen[0].body == {
        "document": "some words",
        "name": "Lease",
        "metadata": {"matter": "2291"},
        "system": "Be brief.",
        "instructions": "Read this:",
        "protect": [{"start": 0, "end": 4}],
        "compression": {
            "ratio": 0.1,
            "tokens": None,
            "policy": "kvzip",
            "scoring": "exact",
            "allow_lossy": True,
        },
        "expires_after": {"anchor": "last_used_at", "seconds": 60},
    }


def test_never_expiring_is_said_and_not_left_out(server: StandIn, kv: KVKeep) -> None:
    kv.contexts.create("some words", expires_after=None)
    assert server.seen[0].body == {"document": "some words", "expires_after": None}


def test_a_file_is_sent_to_the_byte(server: StandIn, kv: KVKeep, tmp_path: Path) -> None:
    path = tmp_path / "lease.txt"
    path.write_bytes("Zeile\r\nzwei \N{LINE SEPARATOR}\U0001f600\0".encode())
    context = kv.contexts.create(path=path)
    assert server.documents[context.id] == "Zeile\r\nzwei \N{LINE SEPARATOR}\U0001f600\0"
    assert context.document() == "Zeile\r\nzwei \N{LINE SEPARATOR}\U0001f600\0"


def test_a_file_that_is_not_text_is_never_sent(server: StandIn, kv: KVKeep, tmp_path: Path) -> None:
    path = tmp_path / "scan.pdf"
    path.write_bytes(b"%PDF-1.7 \xe2\xe3")
    with pytest.raises(ValueError, match=r"scan\.pdf is not UTF-8 text \(byte 9\)"):
        kv.contexts.create(path=path)
    assert server.seen == []


def test_a_document_is_given_in_one_way(server: StandIn, kv: KVKeep, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="either"):
        kv.contexts.create()
    with pytest.raises(ValueError, match="either"):
        kv.contexts.create("some words", path=tmp_path)
    assert server.seen == []


def test_an_empty_document_is_the_servers_to_refuse(kv: KVKeep) -> None:
    with pytest.raises(EmptyDocument):
        kv.contexts.create("")


def test_waiting_returns_the_context_ready(kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    assert context.status == "queued"
    assert context.wait() is context
    assert context.status == "ready"
    assert context.info.compression.stored_bytes == 2048


def test_every_stage_of_a_build_is_seen(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    seen = [(info.status, info.progress and info.progress.stage) for info in context.events()]
    assert seen == [
        ("queued", "queued"),
        ("building", "prefill"),
        ("building", "scoring"),
        ("building", "storing"),
        ("ready", None),
    ]


def test_waiting_for_a_ready_context_opens_no_stream(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words").wait()
    server.seen.clear()
    context.wait()
    assert [request.path for request in server.seen] == [f"/contexts/{context.id}"]


def test_waiting_for_a_failed_build_says_why(server: StandIn, kv: KVKeep) -> None:
    server.ends_as = "failed"
    context = kv.contexts.create("some words")
    with pytest.raises(ContextFailed, match="the worker died three times") as caught:
        context.wait()
    assert caught.value.facts["error_code"] == "internal"
    assert context.status == "failed"


def test_an_error_that_ends_a_wait_names_the_context(server: StandIn, kv: KVKeep) -> None:
    server.ends_as = "failed"
    with pytest.raises(ContextFailed) as failed:
        kv.contexts.create("some words", progress=True)
    [context_id] = server.contexts
    assert failed.value.context_id == context_id
    assert context_id in "".join(failed.value.__notes__)
    server.planned = [problem(404, "context_not_found")]
    with pytest.raises(ContextNotFound) as unknown:
        kv.contexts.get("ctx_1")
    assert unknown.value.context_id is None


def test_a_failed_context_can_be_built_again(server: StandIn, kv: KVKeep) -> None:
    server.ends_as = "failed"
    context = kv.contexts.create("some words")
    with pytest.raises(ContextFailed):
        context.wait()
    server.ends_as = "ready"
    assert context.rebuild() is context
    assert context.status == "queued"
    assert context.wait().status == "ready"


def test_a_context_is_prefetched_and_may_be_asked_at_less(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words").wait()
    assert context.prefetch() is context
    assert server.calls("POST")[-1].path == f"/contexts/{context.id}/prefetch"
    context.query("when?", ratio=0.3, min_ratio=0.2)
    body = server.calls("POST")[-1].body
    assert (body["ratio"], body["min_ratio"]) == (0.3, 0.2)


def test_waiting_for_an_expired_context_ends(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    server.finish(context.id, "expired")
    with pytest.raises(ContextExpired):
        context.wait()


def test_waiting_for_a_deleted_context_ends(kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    context.delete()
    with pytest.raises(ContextNotFound):
        context.wait()


def test_a_stream_that_breaks_off_is_joined_again(
    server: StandIn, unhurried: Unhurried, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = unhurried.contexts.create("some words")
    server.ends_as = "building"
    broken_off = []

    def recover(seconds: float) -> None:
        broken_off.append(seconds)
        server.ends_as = "ready"

    monkeypatch.setattr(unhurried.transport, "pause", recover)
    context.wait()
    assert context.status == "ready"
    assert len(broken_off) == 1


def test_waiting_ends_at_its_limit_and_says_what_it_waited_for(
    server: StandIn, unhurried: Unhurried
) -> None:
    server.ends_as = "building"
    context = unhurried.contexts.create("some words")
    with pytest.raises(TimedOut, match=rf"context {context.id} is still \w+ after 0.05 s"):
        context.wait(timeout_seconds=0.05)


def test_the_limit_holds_while_the_server_only_gives_signs_of_life(
    server: StandIn, unhurried: Unhurried
) -> None:
    server.stages = [("prefill", 0.1)] * 1_000_000
    context = unhurried.contexts.create("some words")
    with pytest.raises(TimedOut):
        context.wait(timeout_seconds=0.2)


def test_creating_with_progress_waits_and_writes_each_stage_once(
    server: StandIn, kv: KVKeep, capsys: pytest.CaptureFixture[str]
) -> None:
    server.stages.insert(0, ("prefill", 0.25))
    context = kv.contexts.create("some words", name="Lease", progress=True)
    assert context.status == "ready"
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "Lease: queued",
        "Lease: prefill",
        "Lease: scoring",
        "Lease: storing",
        "Lease: ready",
    ]


def test_progress_needs_no_rich(
    kv: KVKeep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    kv.contexts.create("some words", name="Lease", progress=True)
    assert "Lease: scoring" in capsys.readouterr().err


def test_progress_on_a_terminal_is_a_bar(
    kv: KVKeep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    kv.contexts.create("some words", name="[Lease]", progress=True)
    drawn = capsys.readouterr().err
    assert "━" in drawn
    assert "[Lease]" in drawn


def test_a_question_is_answered(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words").wait()
    answer = context.query("When?", max_tokens=16, return_token_ids=True)
    assert answer.answer == "On 31 March 2029."
    assert answer.context_id == context.id
    assert answer.token_ids == (4, 5)
    assert server.calls("POST")[-1].body == {
        "question": "When?",
        "stream": False,
        "max_tokens": 16,
        "return_token_ids": True,
    }


def test_a_question_asked_too_early_is_not_retried(server: StandIn, unhurried: Unhurried) -> None:
    context = unhurried.contexts.create("some words")
    with pytest.raises(ContextNotReady) as caught:
        context.query("When?")
    assert caught.value.retry_after_seconds == 2
    assert len(server.calls("POST")) == 2


def test_a_listing_goes_on_until_the_last_page(server: StandIn, kv: KVKeep) -> None:
    for number in range(205):
        kv.contexts.create(f"document {number}")
    listed = [context.id for context in kv.contexts.list()]
    assert listed == sorted(server.contexts, reverse=True)
    assert len([seen for seen in server.calls("GET") if seen.path == "/contexts"]) == 3


def test_pages_are_fetched_only_as_needed(server: StandIn, kv: KVKeep) -> None:
    for number in range(101):
        kv.contexts.create(f"document {number}")
    next(kv.contexts.list())
    assert len(server.calls("GET")) == 1


def test_a_listing_can_be_narrowed(server: StandIn, kv: KVKeep) -> None:
    kv.contexts.create("one", metadata={"matter": "1"})
    two = kv.contexts.create("two", metadata={"matter": "2 & 3"})
    two.wait()
    found = kv.contexts.list(status="ready", metadata={"matter": "2 & 3"}, order="asc")
    assert [context.id for context in found] == [two.id]


def test_only_what_changes_is_sent(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words", name="Lease")
    context.update(metadata={"matter": "1"}, name=UNSET)
    assert server.calls("PATCH")[0].body == {"metadata": {"matter": "1"}}
    context.update(name=None, expires_after=ExpiresAfter(60, "created_at"))
    assert server.calls("PATCH")[1].body == {
        "name": None,
        "expires_after": {"anchor": "created_at", "seconds": 60},
    }
    assert context.name is None
    assert context.info.expires_at is not None
    context.update(expires_after=None)
    assert server.calls("PATCH")[2].body == {"expires_after": None}


def test_deleting_twice_is_fine(server: StandIn, kv: KVKeep) -> None:
    context = kv.contexts.create("some words")
    context.delete()
    kv.contexts.delete(context.id)
    assert server.contexts == {}


def test_an_id_can_never_reach_another_route(server: StandIn, kv: KVKeep) -> None:
    with pytest.raises(ContextNotFound):
        kv.contexts.get("../contexts?x=1#y")
    assert server.seen[0].params == []
    with pytest.raises(ValueError, match="context id"):
        kv.contexts.delete("")
    assert len(server.seen) == 1


def test_a_lone_surrogate_is_the_servers_to_refuse(server: StandIn, kv: KVKeep) -> None:
    server.planned = [problem(422, "invalid_encoding")]
    with pytest.raises(InvalidEncoding):
        kv.contexts.create("\ud800")
