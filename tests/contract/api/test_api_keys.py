"""A server with a key asks for it everywhere but under ``/health``."""

from collections.abc import Iterator

import pytest

from ...support.api_server import ApiServer, api_server
from .answers import UNKNOWN, problem

KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("locked"), api_key=KEY) as server:
        yield server


ROUTES = [
    ("GET", "/contexts"),
    ("POST", "/contexts"),
    ("POST", "/contexts/upload"),
    ("GET", f"/contexts/{UNKNOWN}"),
    ("PATCH", f"/contexts/{UNKNOWN}"),
    ("DELETE", f"/contexts/{UNKNOWN}"),
    ("GET", f"/contexts/{UNKNOWN}/document"),
    ("GET", f"/contexts/{UNKNOWN}/events"),
    ("POST", f"/contexts/{UNKNOWN}/query"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", [None, "another-key"])
def test_no_route_opens_without_the_key(
    locked: ApiServer, method: str, path: str, key: str | None
) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = locked.client.request(method, path, headers=headers)
    assert (response.status_code, problem(response)["code"]) == (401, "unauthenticated")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_opens_with_the_key(locked: ApiServer, method: str, path: str) -> None:
    response = locked.client.request(method, path, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code != 401


@pytest.mark.parametrize("path", ["/health/live", "/health/ready"])
def test_health_is_open(locked: ApiServer, path: str) -> None:
    assert locked.client.get(path).status_code == 200


def test_the_description_says_how_to_send_the_key(locked: ApiServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    description = locked.client.get("/openapi.json", headers=headers).json()
    assert description["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert description["paths"]["/contexts"]["post"]["security"] == [{"HTTPBearer": []}]
    assert "security" not in description["paths"]["/health/live"]["get"]
