"""``POST /contexts/{id}/prefetch``: accepted, shed when busy, refused as a question would be."""

from ...support.api_server import ApiServer
from .answers import UNKNOWN, problem


def test_a_ready_context_is_loaded_at_its_own_ratio(api: ApiServer) -> None:
    context = api.create()
    api.worker.prefetched.clear()
    response = api.client.post(f"/contexts/{context['id']}/prefetch")
    assert response.status_code == 202
    assert response.json() == context
    record = api.run(api.registry.context("default", context["id"]))
    assert api.worker.prefetched == [("default", record.cache_id, 0.3)]
    # It is a hint, not a use: what expires by its last use is not kept alive by it.
    assert api.client.get(f"/contexts/{context['id']}").json()["last_used_at"] is None


def test_one_more_than_can_be_loaded_is_told_to_come_later(api: ApiServer) -> None:
    context = api.create()
    api.worker.prefetched[:] = [("default", "a", 0.3), ("default", "b", 0.3)]
    response = api.client.post(f"/contexts/{context['id']}/prefetch")
    body = problem(response)
    assert (response.status_code, body["code"]) == (503, "overloaded")
    assert int(response.headers["Retry-After"]) >= 1
    api.worker.prefetched.clear()


def test_what_cannot_be_asked_cannot_be_prefetched(api: ApiServer) -> None:
    response = api.client.post(f"/contexts/{UNKNOWN}/prefetch")
    assert (response.status_code, problem(response)["code"]) == (404, "context_not_found")
    api.hold_builds()
    waiting = api.client.post("/contexts", json={"document": "one two three four five"}).json()
    response = api.client.post(f"/contexts/{waiting['id']}/prefetch")
    assert (response.status_code, problem(response)["code"]) == (409, "context_not_ready")
    api.release_builds()
    assert api.worker.prefetched == []
