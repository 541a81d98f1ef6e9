"""Killed at any moment, or robbed of its records: after a restart everything answers as before."""

import re
import shutil
import time
from pathlib import Path

import pytest

from kvkeep_client import KVKeep

from ..support.documents import contract
from ..support.server import EAGER_SWEEPS, Server, eventually, server_environment, start_command

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

QUESTION = "How many days does the carrier have in matters of payment?"
END_OF_TURN = 2
SMILES = "🙂🙂🙂🙂🙂🙂"


def test_field_01_the_real_model_answers_the_same_from_memory_and_after_kill_9(
    tmp_path: Path,
) -> None:
    with Server(tmp_path / "data", threads=1, **EAGER_SWEEPS) as server:
        ready = server.create(contract("Carriage of goods by road", 12))
        # Asked twice: between "ready" and the first question it may not be in memory yet.
        _, before = (server.ask(ready["id"], QUESTION, max_tokens=32) for _ in range(2))
        assert before["timings"]["source"] == "resident"
        # The real model knows how to end an answer: with a token that has no text.
        assert (before["finish_reason"], before["token_ids"][-1]) == ("stop", END_OF_TURN)
        assert "<|im_end|>" not in before["answer"]
        building = server.register(contract("Storage of goods", 20))
        eventually(lambda: (server.context(building["id"])["progress"] or {}).get("fraction"))
        server.kill()
        assert server.valkey_answers()
        _plant_orphans(server)

        server.start()
        assert server.context(building["id"])["status"] in ("queued", "building")
        loaded, again = (server.ask(ready["id"], QUESTION, max_tokens=32) for _ in range(2))
        assert loaded["timings"]["source"] == "store"
        assert again["timings"]["source"] == "resident"
        assert loaded["token_ids"] == again["token_ids"] == before["token_ids"]
        assert loaded["answer"] == before["answer"]

        # The build that was cut short is done again, and leaves nothing but its cache.
        rebuilt = server.ask(building["id"], QUESTION, wait=120, max_tokens=8)
        assert rebuilt["finish_reason"] in ("stop", "length")
        eventually(lambda: _files(server) == _files_of_contexts(2))
        assert len(server.generations()) == 2

        # A character of several tokens arrives whole: the random models do not write any.
        with KVKeep(server.url) as kv:
            context = kv.contexts.create(f"A friendly line: {SMILES}").wait()
            smiling = context.stream(f"Repeat: {SMILES}", max_tokens=10)
            *pieces, last = smiling
        assert re.search("[\U0001f600-\U0001f64f]", "".join(pieces))
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
        assert smiling.answer.answer == "".join([*pieces, last])


def test_killed_in_a_commit_or_robbed_of_all_records_nothing_is_lost(
    tmp_path: Path, tiny_model: Path
) -> None:
    with Server(tmp_path / "data", model=tiny_model, threads=1, **EAGER_SWEEPS) as server:
        titles = ("Lease", "Purchase", "Carriage")
        contexts = [server.create(contract(title, 30), name=title)["id"] for title in titles[:2]]
        answers = {id_: server.ask(id_, QUESTION)["token_ids"] for id_ in contexts}

        caught = server.register(contract(titles[2], 60), name=titles[2])["id"]
        _wait_for_a_third_generation(server)
        server.kill()
        server.start()
        answers[caught] = server.ask(caught, QUESTION, wait=120)["token_ids"]
        eventually(lambda: _files(server) == _files_of_contexts(3))
        assert len(server.generations()) == 3
        deleted = server.create(contract("Deleted in time", 30))["id"]
        assert server.http.delete(f"/contexts/{deleted}").status_code == 204

        server.kill()
        assert server.valkey("FLUSHALL").startswith("+OK")
        server.start()
        assert server.http.get("/health/ready").json()["status"] == "degraded"
        eventually(lambda: server.log.count("sweep_skipped") >= 2)
        assert server.terminate() == 0
        assert _files(server) == _files_of_contexts(3)

        assert _reindex(server).startswith("missing and restored: 3 contexts, 3 caches")
        server.start()
        assert server.http.get("/health/ready").json()["status"] == "ok"
        listed = server.http.get("/contexts?order=asc").json()["data"]
        assert [context["id"] for context in listed] == list(answers)
        assert [context["name"] for context in listed] == list(titles)
        assert [context["status"] for context in listed] == ["ready"] * 3
        assert {id_: server.ask(id_, QUESTION)["token_ids"] for id_ in answers} == answers
        assert server.http.get(f"/contexts/{deleted}").status_code == 404
        assert _files(server) == _files_of_contexts(3)

        # The build that was cut short answers as one that never was.
        assert server.http.delete(f"/contexts/{caught}").status_code == 204
        anew = server.create(contract(titles[2], 60))["id"]
        assert server.ask(anew, QUESTION)["token_ids"] == answers[caught]


def _plant_orphans(server: Server) -> None:
    """What other crashes would have left: a whole generation, a torn one, an unfinished file."""
    (live,) = server.generations()
    shutil.copytree(live, live.with_name("0123456789abcdef"))
    torn = live.parent.with_name("e" * 64) / "fedcba9876543210"
    torn.mkdir(parents=True)
    shutil.copy(live / "kv-00.safetensors", torn)
    shutil.copy(live / "kv-01.safetensors", live / ".kvkeep-00112233.tmp")


def _wait_for_a_third_generation(server: Server) -> None:
    """Return the moment the commit's first file appears, temporary ones included."""
    give_up_at = time.monotonic() + 60
    while len({path.parent for path in server.objects.glob("caches/*/*/*/*")}) < 3:
        assert time.monotonic() < give_up_at


def _reindex(server: Server) -> str:
    command = start_command(
        "admin", "reindex", environment=server_environment(data=server.data, model=server.model)
    )
    said, complaints = command.communicate(timeout=120)
    assert command.returncode == 0, complaints
    return said


def _files(server: Server) -> list[str]:
    """Names of all files in the object store, temporary ones included."""
    return sorted(path.name for path in server.objects.rglob("*") if path.is_file())


def _files_of_contexts(count: int) -> list[str]:
    """What belongs to contexts with documents and caches of their own, at ratio 0.3."""
    slabs = [f"kv-{band:02d}.safetensors" for band in range(5)]
    each = ["document.json", "context.json", "manifest.json", *slabs]
    return sorted(["store.json", *each * count])
