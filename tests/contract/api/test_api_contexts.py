"""Looking contexts up, listing and changing them."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvkeep_storage.redis_keys import TenantKeys

from ...support.api_server import ApiServer
from .answers import UNKNOWN, problem


@pytest.mark.parametrize("context_id", [UNKNOWN, "ctx_1", "..", "%2e%2e%2fstore.json", "a:b{c}"])
@pytest.mark.parametrize("path", ["", "/document", "/events"])
def test_field_46_an_unknown_context_is_404(api: ApiServer, context_id: str, path: str) -> None:
    response = api.client.get(f"/contexts/{context_id}{path}")
    assert response.status_code == 404
    assert problem(response)["code"] in ("context_not_found", "not_found")


def test_field_46_an_expired_context_is_410_with_the_time(api: ApiServer) -> None:
    context = api.create(expires_after={"anchor": "created_at", "seconds": 3600})
    path = f"/contexts/{context['id']}"
    api.run(_expire(api, context["id"]))
    for response in (
        api.client.get(path),
        api.client.get(f"{path}/document"),
        api.client.get(f"{path}/events"),
        api.client.patch(path, json={"expires_after": None}),
        api.client.post(f"{path}/query", json={"question": "when?"}),
    ):
        body = problem(response)
        assert (response.status_code, body["code"]) == (410, "context_expired")
        assert body["expired_at"].endswith("Z")
    listed = api.client.get("/contexts", params={"status": "expired"}).json()
    assert context["id"] in [item["id"] for item in listed["data"]]
    assert api.client.delete(path).status_code == 204


async def _expire(api: ApiServer, context_id: str) -> None:
    """Let an hour pass for one context: its record says that it was made long ago."""
    key = TenantKeys("default").context(context_id)
    await api.stores.metadata.link.command("HSET", key, "expires_at", str(time.time() - 10))


def test_a_last_use_moves_a_sliding_expiry(api: ApiServer) -> None:
    context = api.create(expires_after={"anchor": "last_used_at", "seconds": 3600})
    path = f"/contexts/{context['id']}"
    api.client.post(f"{path}/query", json={"question": "when?"})
    used = api.client.get(path).json()
    assert used["queries"] == 1
    assert used["last_used_at"] > context["created_at"]
    assert used["expires_at"] > context["expires_at"]


def test_pages_hold_every_context_once_newest_first(api: ApiServer) -> None:
    made = [api.create(metadata={"batch": "pages"})["id"] for _ in range(5)]
    for order, expected in (("desc", made[::-1]), ("asc", made)):
        seen: list[str] = []
        after: dict[str, str] = {}
        while True:
            query = {"metadata.batch": "pages", "limit": "2", "order": order, **after}
            page = api.client.get("/contexts", params=query).json()
            ids = [item["id"] for item in page["data"]]
            assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
            seen += ids
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == expected


def test_a_page_of_nothing_is_an_empty_list(api: ApiServer) -> None:
    page = api.client.get("/contexts", params={"metadata.batch": "none such"}).json()
    assert page == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_filters_add_up(api: ApiServer) -> None:
    one = api.create(metadata={"batch": "filters", "kind": "a"})["id"]
    api.create(metadata={"batch": "filters", "kind": "b"})
    query = {"metadata.batch": "filters", "metadata.kind": "a", "status": "ready"}
    page = api.client.get("/contexts", params=query).json()
    assert [item["id"] for item in page["data"]] == [one]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("order=newest", "order"),
        ("status=done", "status"),
        ("after=ctx_1", "after"),
        ("page=2", "page"),
        ("limit=1&limit=2", "limit"),
    ],
)
def test_a_query_parameter_that_means_nothing_is_refused(
    api: ApiServer, query: str, field: str
) -> None:
    response = api.client.get(f"/contexts?{query}")
    assert response.status_code == 422
    assert problem(response)["errors"][0]["field"] == field


def test_a_patch_changes_what_it_names_and_nothing_else(api: ApiServer) -> None:
    context = api.create(name="before", metadata={"a": "1", "b": "2"})
    path = f"/contexts/{context['id']}"
    changed = api.client.patch(path, json={"metadata": {"c": "3"}}).json()
    assert changed == {**context, "metadata": {"c": "3"}}
    changed = api.client.patch(path, json={"name": None}).json()
    assert (changed["name"], changed["metadata"]) == (None, {"c": "3"})
    expiry = {"anchor": "created_at", "seconds": 60}
    changed = api.client.patch(path, json={"expires_after": expiry}).json()
    assert changed["expires_at"] is not None
    changed = api.client.patch(path, json={"expires_after": None}).json()
    assert changed["expires_at"] is None
    assert api.client.patch(path, json={}).json() == changed
    assert api.client.get(path).json() == changed


def test_a_patch_reaches_the_mirror(api: ApiServer) -> None:
    context = api.create(name="before")
    api.client.patch(f"/contexts/{context['id']}", json={"name": "after"})
    (mirror,) = api.stored_files(context["id"], "context.json")
    stored = json.loads((api.objects_dir / mirror).read_text())
    assert stored["body"]["record"]["name"] == "after"


def test_a_patch_of_nothing_known_is_refused(api: ApiServer) -> None:
    assert api.client.patch(f"/contexts/{UNKNOWN}", json={}).status_code == 404
    response = api.client.patch(f"/contexts/{UNKNOWN}", json={"status": "ready"})
    assert response.status_code == 422


def test_a_document_comes_back_as_it_was_read(api: ApiServer) -> None:
    text = "  Clause 1.\r\n\tÜber 🙂 alles\0.  "
    context = api.create(document=text, system="Be brief.", protect=[{"start": 2, "end": 9}])
    assert api.client.get(f"/contexts/{context['id']}/document").json() == {
        "object": "document",
        "context_id": context["id"],
        "document": text,
        "system": "Be brief.",
        "instructions": None,
        "protect": [{"start": 2, "end": 9}],
    }


def _change_a_letter(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"agreement", b"agreemint"))


@pytest.mark.parametrize("damage", [_change_a_letter, Path.unlink], ids=["damaged", "missing"])
def test_a_document_that_is_not_whole_is_said_to_be_damaged(
    api: ApiServer, damage: Callable[[Path], None]
) -> None:
    context = api.create()
    (body,) = api.stored_files(context["id"], "document.json")
    damage(api.objects_dir / body)
    response = api.client.get(f"/contexts/{context['id']}/document")
    assert (response.status_code, problem(response)["code"]) == (409, "document_corrupt")
