"""A context from registering to deleting, and a server from start to stop."""

import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvkeep_client import ContextNotFound, KVKeep

from ..support.documents import contract
from ..support.server import START_SECONDS, Server, eventually, server_environment, start_command

pytestmark = pytest.mark.e2e

QUESTION = "Who pays?"


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a command ended that was not to succeed."""

    data: Path
    exit_code: int
    said: str


def test_a_document_goes_in_and_answers_come_out_through_the_sdk(
    server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "contract.txt"
    file.write_bytes(contract("Read from a file\r\n", 20).encode())
    with KVKeep(server.url) as kv:
        context = kv.contexts.create(path=file, name="A file", ratio=0.5).wait()
        assert context.document() == file.read_bytes().decode()
        answer = context.query(QUESTION, max_tokens=8, return_token_ids=True)
        assert answer.token_ids is not None
        assert len(answer.token_ids) == answer.usage.completion_tokens == 8
        assert answer.usage.cached_tokens == context.info.tokens.total
        assert context.refresh().info.queries == 1
        context.delete()
        with pytest.raises(ContextNotFound):
            context.query(QUESTION)


def test_waiting_returns_the_context_when_it_is_ready_and_not_before(server: Server) -> None:
    text = contract("Waited for", 60)
    at_once = server.http.post("/contexts", json={"document": text})
    assert (at_once.status_code, at_once.json()["status"]) == (202, "queued")
    assert at_once.headers["Location"] == f"/contexts/{at_once.json()['id']}"
    assert int(at_once.headers["Retry-After"]) > 0
    # A question that does not wait is told to come back, one that waits is answered.
    early = server.query(at_once.json()["id"], QUESTION)
    assert (early.status_code, early.json()["code"]) == (409, "context_not_ready")
    assert server.query(at_once.json()["id"], QUESTION, wait=60).status_code == 200

    waited = server.http.post("/contexts?wait=60", json={"document": f"{text} And more."})
    assert (waited.status_code, waited.json()["status"]) == (200, "ready")
    assert waited.json()["ready_at"] is not None


def test_progress_is_told_until_the_context_is_ready(server: Server) -> None:
    context = server.register(contract("Followed", 100))
    with server.http.stream("GET", f"/contexts/{context['id']}/events") as response:
        lines = [line.partition(": ") for line in response.iter_lines()]
    names = [value for field, _, value in lines if field == "event"]
    told = [json.loads(value) for field, _, value in lines if field == "data"]
    assert names == ["progress"] * (len(names) - 1) + ["ready"]
    assert told[-1]["status"] == "ready"
    assert told[-1] == server.context(context["id"])


def test_an_idempotency_key_registers_once(server: Server) -> None:
    headers = {"Idempotency-Key": "the-same-twice"}
    body = {"document": contract("Sent twice", 20), "name": "Twice"}
    first = server.http.post("/contexts", json=body, headers=headers)
    server.create(body["document"])
    replayed = server.http.post("/contexts", json=body, headers=headers)
    assert (replayed.status_code, replayed.content) == (first.status_code, first.content)
    assert replayed.headers["Location"] == first.headers["Location"]

    waited = server.http.post("/contexts?wait=60", json=body, headers=headers).json()
    assert (waited["id"], waited["status"]) == (first.json()["id"], "ready")
    other = server.http.post("/contexts", json={**body, "name": "Other"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    named = [c for c in server.http.get("/contexts?limit=100").json()["data"] if c["name"]]
    assert [context["name"] for context in named].count("Twice") == 1


def test_pages_hold_every_context_once_in_order(server: Server) -> None:
    made = [server.create(f"Page {n}.", metadata={"shelf": "pages"})["id"] for n in range(7)]
    for order, expected in (("asc", made), ("desc", made[::-1])):
        listed: list[str] = []
        query = f"/contexts?limit=3&order={order}&metadata.shelf=pages"
        page = server.http.get(query).json()
        while page["has_more"]:
            assert len(page["data"]) == 3
            listed += [context["id"] for context in page["data"]]
            assert (page["first_id"], page["last_id"]) == (listed[-3], listed[-1])
            page = server.http.get(f"{query}&after={page['last_id']}").json()
        listed += [context["id"] for context in page["data"]]
        assert listed == expected


def test_after_delete_no_byte_of_document_or_cache_is_left(server: Server) -> None:
    before = set(server.generations())
    marker = "Zwischenlagerungsvereinbarung"
    context = server.create(f"{contract('To be deleted', 30)} {marker} ✂", name="Gone")
    assert server.ask(context["id"], f"What is a {marker}?")["answer"]
    (generation,) = set(server.generations()) - before
    assert _files_that_hold(server, marker)

    response = server.http.delete(f"/contexts/{context['id']}")
    assert (response.status_code, response.content) == (204, b"")
    assert not generation.parent.exists()
    assert _files_that_hold(server, marker) == []
    assert [path for path in server.objects.rglob("*") if context["id"] in path.name] == []
    # What was read, asked and answered is never logged either.
    assert marker not in server.log
    for response in (
        server.query(context["id"], QUESTION),
        server.http.get(f"/contexts/{context['id']}"),
        server.http.get(f"/contexts/{context['id']}/document"),
    ):
        assert (response.status_code, response.json()["code"]) == (404, "context_not_found")
    assert server.http.delete(f"/contexts/{context['id']}").status_code == 204


def test_an_expired_context_is_swept_with_its_document_and_cache(server: Server) -> None:
    before = set(server.generations())
    marker = "Probefahrtversicherung"
    text = f"{contract('To expire', 30)} {marker}"
    in_time = {"anchor": "created_at", "seconds": 1}
    expiring = server.register(text, expires_after=in_time)
    eventually(lambda: set(server.generations()) - before)
    (generation,) = set(server.generations()) - before
    eventually(lambda: server.http.get(f"/contexts/{expiring['id']}").status_code == 404)
    eventually(lambda: not generation.parent.exists())
    assert _files_that_hold(server, marker) == []
    # Neither memory nor records remember it: the same text is a new document.
    again = server.create(text)
    assert server.ask(again["id"], QUESTION)["token_ids"]


def test_a_context_deleted_while_it_is_built_leaves_nothing(server: Server) -> None:
    before = set(server.generations())
    context = server.register(contract("Deleted in the middle", 200))
    eventually(lambda: server.context(context["id"])["status"] == "building")
    assert server.http.delete(f"/contexts/{context['id']}").status_code == 204
    # The builder takes one document after the other: it is through with that one now.
    other = server.create(contract("The next", 20))
    assert server.http.get(f"/contexts/{context['id']}").status_code == 404
    assert len(set(server.generations()) - before) == 1
    assert server.ask(other["id"], QUESTION)["token_ids"]


def test_equal_documents_share_a_cache_until_the_last_is_deleted(server: Server) -> None:
    before = set(server.generations())
    text = contract("Held in common", 30)
    first, second = server.create(text), server.register(text)
    # The second is ready at once, under an id of its own.
    assert second["status"] == "ready"
    assert first["id"] != second["id"]
    (generation,) = set(server.generations()) - before
    answer = server.ask(first["id"], QUESTION)["token_ids"]
    assert server.http.delete(f"/contexts/{first['id']}").status_code == 204
    assert server.ask(second["id"], QUESTION)["token_ids"] == answer
    assert server.query(first["id"], QUESTION).status_code == 404
    assert server.http.delete(f"/contexts/{second['id']}").status_code == 204
    assert not generation.exists()


@pytest.fixture(scope="module")
def refusals(
    server: Server, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Refusal]:
    """Servers that cannot start beside the one that runs; both are tried at the same time."""
    taken = urlsplit(server.url).port or 0
    attempts = {
        "data": (server.data, 0),
        "port": (tmp_path_factory.mktemp("refused") / "data", taken),
    }

    def attempt(place: tuple[Path, int]) -> Refusal:
        data, port = place
        environment = server_environment(model=tiny_model, data=data, port=port, threads=1)
        command = start_command("serve", environment=environment)
        _, said = command.communicate(timeout=START_SECONDS)
        return Refusal(data, command.returncode, said)

    with ThreadPoolExecutor() as threads:
        return dict(zip(attempts, threads.map(attempt, attempts.values()), strict=True))


def test_sigterm_while_the_model_loads_ends_the_valkey_too(tmp_path: Path) -> None:
    server = Server(tmp_path / "data")
    environment = server_environment(data=server.data, port=0)
    with (tmp_path / "log").open("w") as log:
        process = start_command("serve", environment=environment, stderr=log)
    with process:
        eventually(server.valkey_answers)
        process.terminate()
        assert process.wait(START_SECONDS) == 0, (tmp_path / "log").read_text()
    assert not server.valkey_answers()


def test_a_second_server_on_one_data_directory_is_refused_and_says_why(
    server: Server, refusals: Mapping[str, Refusal]
) -> None:
    refusal = refusals["data"]
    assert refusal.exit_code == 2
    assert str(server.data) in refusal.said
    assert f"process {server.pid}" in refusal.said
    assert "Traceback" not in refusal.said
    # The one that holds it does not notice.
    assert server.http.get("/health/ready").json()["status"] == "ok"


def test_a_port_in_use_is_refused_and_leaves_nothing_running(
    server: Server, refusals: Mapping[str, Refusal]
) -> None:
    refusal = refusals["port"]
    assert refusal.exit_code != 0
    assert str(urlsplit(server.url).port) in refusal.said
    assert "in use" in refusal.said
    assert "Traceback" not in refusal.said
    assert not Server(refusal.data).valkey_answers()


def test_sigterm_ends_server_and_valkey_and_a_build_is_finished_after_the_next_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    with Server(tmp_path / "data", model=tiny_model, threads=1) as server:
        port = urlsplit(server.url).port
        context = server.register(contract("Stopped while it is read", 250))
        eventually(lambda: (server.context(context["id"])["progress"] or {}).get("fraction"))
        assert server.terminate() == 0
        assert not server.valkey_answers()
        with socket.socket() as connection:
            assert connection.connect_ex(("127.0.0.1", port)) != 0
        assert server.generations() == []
        assert "Traceback" not in server.log

        server.start()
        answer = server.ask(context["id"], QUESTION, wait=120)
        assert answer["usage"]["completion_tokens"] > 0
        assert len(server.generations()) == 1


def _files_that_hold(server: Server, text: str) -> list[str]:
    """Files of the whole data directory, records included, that hold a text."""
    wanted = text.encode()
    files = (path for path in server.data.rglob("*") if path.is_file())
    return [str(path) for path in files if wanted in path.read_bytes()]
