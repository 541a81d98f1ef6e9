"""Quotas over HTTP: refused with the numbers, nothing kept, room again after a deletion."""

from collections.abc import Iterator
from typing import Any

import pytest

from ...support.api_server import ApiServer, api_server
from .answers import numbered, problem


@pytest.fixture
def api(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    with api_server(tmp_path_factory.mktemp("data"), **request.param) as server:
        yield server
        server.release_builds()


@pytest.mark.parametrize("api", [{"tenant_contexts": 1}], indirect=True, ids=["contexts"])
def test_one_context_too_many_is_refused_and_nothing_of_it_is_kept(api: ApiServer) -> None:
    context = api.create(document=numbered(1))
    before = api.stored_files()
    headers = {"Idempotency-Key": "again"}
    for _ in range(2):
        response = api.client.post("/contexts", json={"document": numbered(2)}, headers=headers)
        assert response.status_code == 429
        body = problem(response)
        assert (body["code"], body["quota"]) == ("quota_exceeded", "contexts")
        assert (body["limit"], body["used"], body["asked"]) == (1, 1, 1)
        assert int(response.headers["retry-after"]) > 0
    assert api.stored_files() == before
    assert api.client.get("/contexts").json()["data"] == [context]
    api.client.delete(f"/contexts/{context['id']}")
    # The refused request freed its key: it is answered anew.
    response = api.client.post("/contexts", json={"document": numbered(2)}, headers=headers)
    assert response.status_code == 202
    # An answer that was given is given again, whatever the quota says now.
    replayed = api.client.post("/contexts", json={"document": numbered(2)}, headers=headers)
    assert (replayed.status_code, replayed.content) == (202, response.content)


@pytest.mark.parametrize("api", [{"tenant_queued": 1}], indirect=True, ids=["queued"])
def test_a_full_queue_is_no_obstacle_to_what_needs_no_build(api: ApiServer) -> None:
    api.create(document=numbered(1))
    api.hold_builds()
    assert api.client.post("/contexts", json={"document": numbered(2)}).status_code == 202
    response = api.client.post("/contexts", json={"document": numbered(3)})
    assert (response.status_code, problem(response)["quota"]) == (429, "queued")
    assert api.client.post("/contexts", json={"document": numbered(1)}).status_code == 200


@pytest.mark.parametrize("api", [{"tenant_bytes": 800}], indirect=True, ids=["bytes"])
def test_bytes_are_charged_at_admission_and_refunded_when_the_build_fails(api: ApiServer) -> None:
    api.hold_builds()
    first = api.client.post("/contexts", json={"document": numbered(1)}).json()
    charged = api.run(api.stores.metadata.usage("default")).bytes
    assert 400 < charged <= 800
    response = api.client.post("/contexts", json={"document": numbered(2)})
    body = problem(response)
    assert (body["quota"], body["limit"], body["used"]) == ("bytes", 800, charged)
    assert api.run(api.stores.metadata.fail_context("default", first["id"], "build_failed", "x"))
    assert api.client.post("/contexts", json={"document": numbered(2)}).status_code == 202
