"""Two real servers on one object store and one Redis, which is taken from them for a while."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from ..support.documents import contract
from ..support.redis_servers import ValkeyProcess, running
from ..support.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.redis]

QUESTION = "How many days does the carrier have in matters of payment?"


def test_field_58_two_servers_build_once_answer_alike_and_see_each_other_s_deletions(
    tmp_path: Path,
) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    with ExitStack() as stack:
        redis: ValkeyProcess = stack.enter_context(running(ValkeyProcess(tmp_path / "redis")))
        threads = stack.enter_context(ThreadPoolExecutor(2))
        shared = {"redis_url": redis.url, "store": objects.as_uri(), "threads": 1}
        servers = [Server(tmp_path / name, **shared) for name in ("one", "two")]
        for server in servers:
            stack.callback(server.close)
        one, two = threads.map(Server.start, servers)

        text = contract("Carriage of goods by road", 4)
        first, second = threads.map(lambda server: server.create(text), (one, two))
        assert first["id"] != second["id"]
        assert len(list(objects.glob("caches/*/*/*"))) == 1

        pairs = [(server, context["id"]) for server in (one, two) for context in (first, second)]
        answers = {
            tuple(server.ask(context, QUESTION, max_tokens=6)["token_ids"])
            for server, context in pairs
        }
        assert len(answers) == 1

        assert one.http.delete(f"/contexts/{first['id']}").status_code == 204
        # It is in the memory of both; the record decides, at every question.
        for server in (one, two):
            gone = server.query(first["id"], QUESTION)
            assert (gone.status_code, gone.json()["code"]) == (404, "context_not_found")
            assert tuple(server.ask(second["id"], QUESTION, max_tokens=6)["token_ids"]) in answers

        redis.kill()
        for server in (one, two):
            # The token ids of the document come from the object store, the rest from memory.
            assert tuple(server.ask(second["id"], QUESTION, max_tokens=6)["token_ids"]) in answers
            for away in (
                server.query(first["id"], QUESTION),
                server.http.get(f"/contexts/{second['id']}"),
                server.http.post("/contexts", json={"document": text}),
            ):
                assert (away.status_code, away.json()["code"]) == (503, "metadata_unavailable")
                assert int(away.headers["retry-after"]) >= 1
            assert server.http.get("/health/ready").status_code == 503
        redis.start().until_it_answers()
        for server in (one, two):
            assert tuple(server.ask(second["id"], QUESTION, max_tokens=6)["token_ids"]) in answers
            assert server.http.get("/health/ready").json()["status"] == "ok"

        assert two.http.delete(f"/contexts/{second['id']}").status_code == 204
        assert one.query(second["id"], QUESTION).status_code == 404
        assert [path for path in objects.rglob("*") if path.is_file()] == [objects / "store.json"]

        redis.call("FLUSHALL")
        for server in (one, two):
            lost = server.http.get(f"/contexts/{second['id']}")
            assert (lost.status_code, lost.json()["code"]) == (503, "metadata_unavailable")
            assert "reindex" in lost.json()["detail"]
            assert server.http.get("/health/ready").json()["status"] == "degraded"
        assert [server.terminate() for server in (one, two)] == [0, 0]
