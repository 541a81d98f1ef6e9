"""Reading what the API answers."""

import json
from typing import Any

from ...support.api_server import DOCUMENT

UNKNOWN = "ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PX"


def numbered(number: int) -> str:
    """A document of its own, so that no cache is there yet."""
    return f"{DOCUMENT} Number {number}."


def problem(response: Any) -> dict[str, Any]:
    """The problem of a failed request, its form checked."""
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:kvkeep:error:{body['code']}"
    assert body["status"] == response.status_code
    assert body["request_id"] == response.headers["x-request-id"]
    return body


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Split a stream into its events; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found
