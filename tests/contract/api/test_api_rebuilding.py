"""Building a context again over HTTP: after a failure, and to replace what is stored."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep_service.errors import HeadScoresMissing

from ...support.api_server import ApiServer
from .answers import UNKNOWN, numbered, problem

QUESTION = {"question": "when?"}


def _rebuild(api: ApiServer, context_id: str) -> dict[str, object]:
    response = api.client.post(f"/contexts/{context_id}/rebuild")
    assert response.status_code == 202, response.text
    context: dict[str, object] = response.json()
    return context


def _generations(api: ApiServer, context_id: str) -> list[str]:
    cache_id = api.run(api.registry.context("default", context_id)).cache_id
    return api.stored_files(cache_id, "manifest.json")


def test_a_failed_context_is_built_again_and_answers(api: ApiServer) -> None:
    api.worker.fail_next_build = True
    body = {"document": numbered(31)}
    failed = api.client.post("/contexts?wait=30", json=body).json()
    assert failed["status"] == "failed"
    context = _rebuild(api, failed["id"])
    assert (context["status"], context["error"]) == ("queued", None)
    record = api.run(api.registry.finished("default", failed["id"], 30))
    assert record.status == "ready"
    assert api.client.post(f"/contexts/{failed['id']}/query", json=QUESTION).status_code == 200


def test_a_ready_context_answers_while_a_fresh_generation_is_built(api: ApiServer) -> None:
    context = api.create(document=numbered(32))
    before = _generations(api, context["id"])
    api.hold_builds()
    rebuilt = _rebuild(api, context["id"])
    assert rebuilt["status"] == "ready"
    assert rebuilt["progress"] == {"stage": "queued", "fraction": 0.0}
    # Asked for twice, built once.
    _rebuild(api, context["id"])
    assert api.client.post(f"/contexts/{context['id']}/query", json=QUESTION).status_code == 200
    api.release_builds()
    deadline = time.monotonic() + 30
    while api.client.get(f"/contexts/{context['id']}").json()["progress"] is not None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    after = _generations(api, context["id"])
    assert len(after) == len(before) + 1
    assert api.run(api.stores.metadata.unfinished()) == []
    assert api.client.post(f"/contexts/{context['id']}/query", json=QUESTION).status_code == 200


def test_a_ready_context_keeps_its_cache_when_the_fresh_build_fails(api: ApiServer) -> None:
    context = api.create(document=numbered(33))
    before = _generations(api, context["id"])
    api.worker.fail_next_build = True
    _rebuild(api, context["id"])
    deadline = time.monotonic() + 30
    while (shown := api.client.get(f"/contexts/{context['id']}").json())["progress"] is not None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    assert (shown["status"], shown["error"]) == ("ready", None)
    assert _generations(api, context["id"]) == before
    assert api.run(api.stores.metadata.unfinished()) == []


def test_what_is_built_already_is_left_as_it_is(api: ApiServer) -> None:
    api.hold_builds()
    context = api.client.post("/contexts", json={"document": numbered(34)}).json()
    assert _rebuild(api, context["id"])["status"] in ("queued", "building")


def test_what_is_not_there_cannot_be_built_again(api: ApiServer) -> None:
    response = api.client.post(f"/contexts/{UNKNOWN}/rebuild")
    assert (response.status_code, problem(response)["code"]) == (404, "context_not_found")


def test_what_would_come_out_as_another_cache_is_refused_and_keeps_answering(
    api: ApiServer,
) -> None:
    context = api.create(document=numbered(36))
    api.worker.policy_version = 2
    refused = problem(api.client.post(f"/contexts/{context['id']}/rebuild"))
    assert (refused["status"], refused["code"]) == (409, "build_mismatch")
    assert "policy version: 1 then, 2 here" in refused["detail"]
    assert "register the document again" in refused["detail"]
    assert refused["other_builders"] == 0
    # A server beside this one: it may be of the older version.
    api.run(api.stores.jobs.claim("older", 0))
    refused = problem(api.client.post(f"/contexts/{context['id']}/rebuild"))
    assert refused["other_builders"] == 1
    shown = api.client.get(f"/contexts/{context['id']}").json()
    assert (shown["status"], shown["progress"]) == ("ready", None)
    assert api.client.post(f"/contexts/{context['id']}/query", json=QUESTION).status_code == 200


def test_a_failed_context_that_cannot_be_built_here_stays_failed(api: ApiServer) -> None:
    api.worker.fail_next_build = True
    failed = api.client.post("/contexts?wait=30", json={"document": numbered(37)}).json()
    api.worker.planning_error = HeadScoresMissing()
    refused = problem(api.client.post(f"/contexts/{failed['id']}/rebuild"))
    assert (refused["status"], refused["code"]) == (409, "build_mismatch")
    assert "this server has none" in refused["detail"]
    assert api.client.get(f"/contexts/{failed['id']}").json()["status"] == "failed"


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"agreement", b"agreemeny"))


@pytest.mark.parametrize("damage", [_damage, Path.unlink], ids=["damaged", "missing"])
def test_a_document_that_is_not_whole_is_told_before_anything_is_queued(
    api: ApiServer, damage: Callable[[Path], None]
) -> None:
    context = api.create(document=numbered(35))
    damage(api.objects_dir / "documents" / "default" / context["id"] / "document.json")
    response = api.client.post(f"/contexts/{context['id']}/rebuild")
    assert (response.status_code, problem(response)["code"]) == (409, "document_corrupt")
    assert api.client.get(f"/contexts/{context['id']}").json()["progress"] is None


@pytest.mark.parametrize("ask", [("POST", "/rebuild"), ("GET", "/document")], ids=str)
def test_a_context_whose_deletion_was_cut_short_is_not_called_damaged(
    api: ApiServer, ask: tuple[str, str]
) -> None:
    context = api.create(document=numbered(36))
    folder = api.objects_dir / "documents" / "default" / context["id"]
    for name in ("context.json", "document.json"):
        (folder / name).unlink()
    response = api.client.request(ask[0], f"/contexts/{context['id']}{ask[1]}")
    assert (response.status_code, problem(response)["code"]) == (404, "context_not_found")
    assert api.client.delete(f"/contexts/{context['id']}").status_code == 204
