"""Health, versions, the description of the API, and what is logged."""

import json
from typing import Any

import pytest

from kvkeep_service.api.errors import CATALOGUE, MEDIA_TYPE

from ...support.api_server import ApiServer


@pytest.fixture(scope="module")
def description(shared_server: ApiServer) -> dict[str, Any]:
    described: dict[str, Any] = shared_server.client.get("/openapi.json").json()
    return described


def operations(description: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]


def test_a_server_with_everything_is_ready(api: ApiServer) -> None:
    response = api.client.get("/health/ready")
    assert response.status_code == 200
    checks = {
        "worker": "ok",
        "kernels": "ok",
        "metadata": "ok",
        "objects": "ok",
        "store": "ok",
    }
    assert response.json() == {"status": "ok", "checks": checks}


def test_a_server_whose_worker_died_lives_and_is_not_ready(api: ApiServer) -> None:
    api.worker.alive = False
    try:
        response = api.client.get("/health/ready")
        assert (response.status_code, response.json()["status"]) == (503, "unavailable")
        assert response.json()["checks"]["worker"] == "unavailable"
        assert api.client.get("/health/live").status_code == 200
    finally:
        api.worker.alive = True


def test_stores_that_do_not_belong_together_are_degraded(api: ApiServer) -> None:
    store_id = api.run(api.stores.metadata.store_id())
    assert store_id is not None
    api.run(api.stores.metadata.bind_store("another"))
    try:
        response = api.client.get("/health/ready")
        assert (response.status_code, response.json()["status"]) == (200, "degraded")
        assert response.json()["checks"]["store"] == "degraded"
    finally:
        api.run(api.stores.metadata.bind_store(store_id))


def test_the_version_names_what_auto_became(api: ApiServer) -> None:
    version = api.client.get("/version").json()
    assert (version["model"], version["device"], version["dtype"]) == ("scripted", "cpu", "float32")
    assert version["packages"].keys() >= {"torch", "transformers"}


def test_the_served_model_is_listed_as_openai_clients_expect(api: ApiServer) -> None:
    models = api.client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["scripted"]


def test_the_interactive_description_is_there(api: ApiServer) -> None:
    assert api.client.get("/docs").status_code == 200


def test_every_route_of_the_contract_is_described(description: dict[str, Any]) -> None:
    assert {name for name, _ in operations(description)} == {
        "POST /contexts",
        "GET /contexts",
        "GET /contexts/{context_id}",
        "PATCH /contexts/{context_id}",
        "DELETE /contexts/{context_id}",
        "POST /contexts/{context_id}/prefetch",
        "POST /contexts/{context_id}/rebuild",
        "GET /metrics",
        "GET /contexts/{context_id}/document",
        "GET /contexts/{context_id}/events",
        "POST /contexts/{context_id}/query",
        "GET /health/live",
        "GET /health/ready",
        "GET /version",
        "GET /v1/models",
    }


def test_every_reference_in_the_description_leads_somewhere(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    text = json.dumps(description)
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references == references & schemas.keys()
    assert "HTTPValidationError" not in schemas
    assert "Problem" in references


def test_every_failure_is_described_as_a_problem_with_codes_of_the_catalogue(
    description: dict[str, Any],
) -> None:
    for name, operation in operations(description):
        for status, response in operation["responses"].items():
            if int(status) < 400 or name == "GET /health/ready":
                continue
            assert list(response["content"]) == [MEDIA_TYPE], name
            codes = response["description"].split("`")[1::2]
            assert codes, name
            assert {CATALOGUE[code].status for code in codes} == {int(status)}, name


def test_requests_are_described_with_examples(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    for name in ("ContextCreate", "ContextPatch", "Query"):
        assert schemas[name]["examples"], name
        assert schemas[name]["additionalProperties"] is False


def test_both_forms_of_an_answer_are_described(description: dict[str, Any]) -> None:
    query = description["paths"]["/contexts/{context_id}/query"]["post"]
    content = query["responses"]["200"]["content"]
    assert content.keys() == {"application/json", "text/event-stream"}
    events = description["paths"]["/contexts/{context_id}/events"]["get"]
    assert list(events["responses"]["200"]["content"]) == ["text/event-stream"]


def test_what_users_write_is_never_logged(
    api: ApiServer, capfd: pytest.CaptureFixture[str]
) -> None:
    context = api.create(document="a secret document of five words", name="secret name")
    path = f"/contexts/{context['id']}"
    for question in ("secret question", "breaks", "breaks at once", "is lost on the way"):
        api.client.post(f"{path}/query", json={"question": question, "system": "secret"})
        api.client.post(f"{path}/query", json={"question": question, "stream": True})
    api.client.get("/contexts", params={"metadata.secret": "secret"})
    api.client.post("/contexts", json={"document": "secret", "metadata": {"secret": 7}})
    api.client.delete(path)
    logged = "".join(capfd.readouterr())
    assert "status=500" in logged
    assert path in logged
    assert "secret" not in logged
