"""``GET /contexts/{id}/events``: a build from its start to its end."""

from ...support.api_server import ApiServer
from .answers import events_of, numbered


def test_a_build_is_followed_to_its_end(api: ApiServer) -> None:
    api.hold_builds()
    context = api.client.post("/contexts", json={"document": numbered(30)}).json()
    with api.client.stream("GET", f"/contexts/{context['id']}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_text()
        first = next(lines)
        api.release_builds()
        events = events_of(first + "".join(lines))
    assert events[0][0] == "progress"
    assert events[0][1]["status"] == "queued"
    assert [name for name, _ in events[:-1]] == ["progress"] * (len(events) - 1)
    name, last = events[-1]
    assert (name, last["status"], last["id"]) == ("ready", "ready", context["id"])


def test_a_failed_build_is_followed_to_its_reason(api: ApiServer) -> None:
    api.worker.fail_next_build = True
    response = api.client.post("/contexts?wait=30", json={"document": numbered(31)})
    context = response.json()
    reason = {"code": "document_corrupt", "detail": "the document is damaged"}
    assert (context["status"], context["error"]) == ("failed", reason)
    text = api.client.get(f"/contexts/{context['id']}/events").text
    assert events_of(text) == [("failed", context)]


def test_a_context_deleted_while_it_is_followed_ends_the_stream_with_an_error(
    api: ApiServer,
) -> None:
    api.hold_builds()
    context = api.client.post("/contexts", json={"document": numbered(32)}).json()
    with api.client.stream("GET", f"/contexts/{context['id']}/events") as stream:
        lines = stream.iter_text()
        first = next(lines)
        api.client.delete(f"/contexts/{context['id']}")
        events = events_of(first + "".join(lines))
    assert (events[-1][0], events[-1][1]["code"]) == ("error", "context_not_found")
