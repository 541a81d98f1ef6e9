"""Deleting a context: nothing of it is left when the answer comes."""

import threading
import time

from ...support.api_server import ApiServer
from .answers import UNKNOWN, numbered, problem


def test_nothing_of_a_deleted_context_is_left_when_the_answer_comes(api: ApiServer) -> None:
    context = api.create(document=numbered(20))
    cache_id = api.run(api.registry.context("default", context["id"])).cache_id
    assert api.stored_files(cache_id, "manifest.json") != []
    response = api.client.delete(f"/contexts/{context['id']}")
    assert (response.status_code, response.content) == (204, b"")
    assert api.stored_files(context["id"]) == []
    assert api.stored_files(cache_id) == []
    assert ("default", cache_id) in api.worker.dropped
    assert api.client.get(f"/contexts/{context['id']}").status_code == 404


def test_deleting_twice_is_no_error(api: ApiServer) -> None:
    context = api.create()
    for _ in range(2):
        assert api.client.delete(f"/contexts/{context['id']}").status_code == 204
    assert api.client.delete(f"/contexts/{UNKNOWN}").status_code == 204


def test_what_is_no_id_at_all_cannot_be_deleted(api: ApiServer) -> None:
    assert api.client.delete("/contexts/ctx_1").status_code == 404


def test_a_shared_cache_outlives_all_but_its_last_context(api: ApiServer) -> None:
    first = api.create(document=numbered(21))
    second = api.create(document=numbered(21))
    cache_id = api.run(api.registry.context("default", first["id"])).cache_id
    api.client.delete(f"/contexts/{first['id']}")
    assert api.stored_files(cache_id, "manifest.json") != []
    query = {"question": "when?"}
    assert api.client.post(f"/contexts/{second['id']}/query", json=query).status_code == 200
    api.client.delete(f"/contexts/{second['id']}")
    assert api.stored_files(cache_id) == []


def test_a_cache_that_is_being_read_goes_with_its_last_reader(api: ApiServer) -> None:
    context = api.create(document=numbered(22))
    cache_id = api.run(api.registry.context("default", context["id"])).cache_id
    lease = api.stores.leases.read_lease("default", cache_id)
    api.run(lease.__aenter__())
    assert api.client.delete(f"/contexts/{context['id']}").status_code == 204
    assert api.stored_files(context["id"]) == []
    assert api.stored_files(cache_id, "manifest.json") != []
    api.run(lease.__aexit__(None, None, None))
    deadline = time.monotonic() + 20
    while api.stored_files(cache_id) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert api.stored_files(cache_id) == []


def test_a_context_deleted_while_it_waits_ends_the_wait(api: ApiServer) -> None:
    api.hold_builds()
    context = api.client.post("/contexts", json={"document": numbered(23)}).json()
    responses = []
    path = f"/contexts/{context['id']}/query?wait=60"
    asking = threading.Thread(
        target=lambda: responses.append(api.client.post(path, json={"question": "when?"}))
    )
    asking.start()
    api.client.delete(f"/contexts/{context['id']}")
    asking.join(timeout=30)
    assert problem(responses[0])["code"] == "context_not_found"
