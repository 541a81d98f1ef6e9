"""``POST /contexts`` over a real server, a real Valkey and a local object store."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from ...support.api_server import ApiServer, api_server
from .answers import numbered, problem


def test_a_registered_document_answers_202_with_everything_known(api: ApiServer) -> None:
    api.hold_builds()
    response = api.client.post(
        "/contexts",
        json={
            "document": numbered(1),
            "name": "Agreement",
            "metadata": {"matter": "2291"},
            "compression": {"ratio": 0.25},
            "expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    )
    assert response.status_code == 202
    context = response.json()
    assert response.headers["location"] == f"/contexts/{context['id']}"
    assert int(response.headers["retry-after"]) > 0
    assert context["object"] == "context"
    assert (context["name"], context["metadata"]) == ("Agreement", {"matter": "2291"})
    assert (context["status"], context["error"], context["queries"]) == ("queued", None, 0)
    assert context["progress"] == {"stage": "queued", "fraction": 0.0}
    assert context["tokens"] == {"document": 17, "protected": 7, "total": 24}
    assert context["compression"]["ratio"] == 0.25
    assert context["created_at"].endswith("Z")
    assert context["expires_at"] > context["created_at"]
    assert context["ready_at"] is None


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_quantised_context_says_that_it_is_one(api: ApiServer, quantization: str) -> None:
    api.hold_builds()
    body = {"document": numbered(5), "compression": {"quantization": quantization}}
    response = api.client.post("/contexts", json=body)
    assert response.status_code == 202
    assert response.json()["compression"]["quantization"] == quantization


def test_a_context_says_whether_what_it_evicts_leaves_remainders(api: ApiServer) -> None:
    api.hold_builds()
    said = {}
    for number, asked in enumerate(({}, {"remainder": False}, {"policy": "snapkv"})):
        body = {"document": numbered(40 + number), "compression": asked}
        context = api.client.post("/contexts", json=body).json()
        said[str(asked)] = context["compression"]["remainder"]
        again = api.client.get(f"/contexts/{context['id']}").json()
        assert again["compression"]["remainder"] == context["compression"]["remainder"]
    assert list(said.values()) == [True, False, False]


def test_a_quantisation_that_is_not_known_is_refused_by_name(api: ApiServer) -> None:
    body = {"document": numbered(6), "compression": {"quantization": "fp4"}}
    response = api.client.post("/contexts", json=body)
    assert response.status_code == 422
    assert "compression.quantization" in str(problem(response)["errors"])


@pytest.mark.parametrize("in_the_body", [False, True])
def test_waiting_holds_the_request_until_the_context_is_ready(
    api: ApiServer, in_the_body: bool
) -> None:
    body = {"document": numbered(2 + in_the_body), **({"wait": 30} if in_the_body else {})}
    response = api.client.post("/contexts", params={} if in_the_body else {"wait": 30}, json=body)
    assert response.status_code == 200
    assert "retry-after" not in response.headers
    context = response.json()
    assert (context["status"], context["progress"]) == ("ready", None)
    assert context["compression"]["stored_bytes"] > 0
    assert context["compression"]["ratios_available"] == [0.05, 0.1, 0.15, 0.2, 0.3]


def test_waiting_ends_with_202_when_the_time_is_up(api: ApiServer) -> None:
    api.hold_builds()
    response = api.client.post("/contexts?wait=0.2", json={"document": numbered(4)})
    assert response.status_code == 202


def test_two_different_waits_are_refused(api: ApiServer) -> None:
    response = api.client.post("/contexts?wait=1", json={"document": numbered(5), "wait": 2})
    assert problem(response)["errors"][0]["field"] == "wait"


def test_an_equal_document_is_ready_at_once_under_an_id_of_its_own(api: ApiServer) -> None:
    first = api.create(document=numbered(6))
    api.hold_builds()
    response = api.client.post("/contexts", json={"document": numbered(6), "name": "again"})
    assert response.status_code == 200
    second = response.json()
    assert second["id"] != first["id"]
    assert (second["status"], second["name"]) == ("ready", "again")
    lower = api.client.post(
        "/contexts", json={"document": numbered(6), "compression": {"ratio": 0.2}}
    )
    assert lower.status_code == 200
    assert lower.json()["compression"]["ratios_available"] == [0.05, 0.1, 0.15, 0.2]
    higher = api.client.post(
        "/contexts", json={"document": numbered(6), "compression": {"ratio": 0.5}}
    )
    assert higher.status_code == 202


def test_several_documents_are_one_context(api: ApiServer) -> None:
    parts = [{"name": "a.md", "text": "one two"}, {"name": "b.md", "text": "three"}]
    response = api.client.post("/contexts", json={"documents": parts})
    document = api.client.get(f"/contexts/{response.json()['id']}/document").json()
    assert document["document"] == "a.md\n\none two\n\nb.md\n\nthree"


def test_field_44_a_short_document_is_accepted_and_said_to_be_whole(api: ApiServer) -> None:
    context = api.create(document="only three words")
    assert context["compression"]["policy_applied"] == "none"


def test_field_47_a_long_build_does_not_hold_the_request(api: ApiServer) -> None:
    api.hold_builds()
    response = api.client.post("/contexts", json={"document": numbered(7)})
    assert response.status_code == 202


def test_an_expiry_left_out_is_the_default_and_null_is_never(tmp_path: Path) -> None:
    with api_server(tmp_path, default_ttl_seconds=3600) as api:
        assert api.create()["expires_at"] is not None
        assert api.create(expires_after=None)["expires_at"] is None


def test_without_a_default_a_context_never_expires(api: ApiServer) -> None:
    assert api.create()["expires_at"] is None


def test_the_served_model_may_be_named_and_no_other(api: ApiServer) -> None:
    assert api.create(model="scripted")["model"] == "scripted"
    response = api.client.post("/contexts", json={"document": "x", "model": "gpt-x"})
    body = problem(response)
    assert (response.status_code, body["code"]) == (404, "model_not_found")
    assert (body["field"], body["served"]) == ("model", "scripted")


def test_a_document_over_the_model_is_refused_with_both_numbers(api: ApiServer) -> None:
    response = api.client.post("/contexts", json={"document": "word " * 1001})
    body = problem(response)
    assert (response.status_code, body["code"]) == (413, "document_too_long")
    assert (body["field"], body["tokens"], body["max_tokens"]) == ("document", 1001, 1000)


def test_a_refused_document_leaves_nothing(api: ApiServer) -> None:
    before = api.stored_files("documents/")
    api.client.post("/contexts", json={"document": "word " * 1001})
    api.client.post("/contexts", json={"document": " "})
    assert api.stored_files("documents/") == before


def test_uploading_says_that_it_is_not_supported(api: ApiServer) -> None:
    response = api.client.post("/contexts/upload", files={"file": ("a.txt", b"text")})
    assert response.status_code == 422
    assert "not supported by this version" in problem(response)["detail"]


def test_the_same_key_and_body_answer_the_same_again(api: ApiServer) -> None:
    api.hold_builds()
    headers = {"Idempotency-Key": "key-1"}
    first = api.client.post("/contexts", json={"document": numbered(10)}, headers=headers)
    again = api.client.post("/contexts", json={"document": numbered(10)}, headers=headers)
    assert again.status_code == first.status_code == 202
    assert again.content == first.content
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]


def test_a_repeated_request_that_waits_waits_for_the_same_context(api: ApiServer) -> None:
    api.hold_builds()
    headers = {"Idempotency-Key": "key-2"}
    first = api.client.post("/contexts", json={"document": numbered(11)}, headers=headers)
    api.release_builds()
    again = api.client.post("/contexts?wait=30", json={"document": numbered(11)}, headers=headers)
    assert again.status_code == 200
    assert (again.json()["id"], again.json()["status"]) == (first.json()["id"], "ready")


def test_the_same_key_with_another_body_is_refused(api: ApiServer) -> None:
    headers = {"Idempotency-Key": "key-3"}
    api.client.post("/contexts", json={"document": numbered(12)}, headers=headers)
    response = api.client.post("/contexts", json={"document": numbered(13)}, headers=headers)
    assert (response.status_code, problem(response)["code"]) == (422, "idempotency_mismatch")


def test_a_key_whose_request_failed_is_free_again(api: ApiServer) -> None:
    headers = {"Idempotency-Key": "key-4"}
    response = api.client.post("/contexts", json={"document": "word " * 1001}, headers=headers)
    assert response.status_code == 413
    response = api.client.post("/contexts", json={"document": numbered(14)}, headers=headers)
    assert response.status_code == 202


def test_a_key_whose_request_runs_is_in_flight(api: ApiServer) -> None:
    body = json.dumps({"document": numbered(15)}).encode()
    api.run(_begin(api, "key-5", body))
    headers = {"Idempotency-Key": "key-5", "content-type": "application/json"}
    response = api.client.post("/contexts", content=body, headers=headers)
    assert (response.status_code, problem(response)["code"]) == (409, "idempotency_in_flight")
    assert int(response.headers["retry-after"]) > 0


async def _begin(api: ApiServer, key: str, body: bytes) -> None:
    digest = sha256(body).hexdigest()
    await api.stores.metadata.idempotency_begin("default", key, digest, 60)


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_outside_its_limit_is_refused(api: ApiServer, key: str) -> None:
    response = api.client.post(
        "/contexts", json={"document": "x"}, headers={"Idempotency-Key": key}
    )
    assert problem(response)["errors"][0]["field"] == "idempotency-key"
