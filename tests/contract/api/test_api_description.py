"""The OpenAPI document explains itself: no field, parameter or operation is left without words."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from kvkeep_service.ports import PolicyName

from ...support.api_server import ApiServer

JSON = dict[str, Any]

# What the contract has and this version refuses, with the one value that is accepted.
REFUSED = {
    "ContextCreate": {"messages": "null"},
    "Compression": {},
}


@pytest.fixture(scope="module")
def document(shared_server: ApiServer) -> JSON:
    described: JSON = shared_server.client.get("/openapi.json").json()
    return described


def operations(document: JSON) -> Iterator[tuple[str, JSON]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def properties(schema: object, path: str) -> Iterator[tuple[str, JSON]]:
    """Yield every property of a schema, those of schemas inside it included."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from properties(item, f"{path}.{index}")
    elif isinstance(schema, dict):
        for name, described in schema.get("properties", {}).items():
            yield f"{path}.{name}", described
        for name, part in schema.items():
            if name != "examples":
                yield from properties(part, f"{path}.{name}")


def is_one_line(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip()) and "\n" not in text


def test_every_property_is_described_in_one_line(document: JSON) -> None:
    found = list(properties(document, "openapi"))
    assert len(found) > 100
    assert [path for path, schema in found if not is_one_line(schema.get("description"))] == []


def test_every_parameter_is_described_in_one_line(document: JSON) -> None:
    found = [
        (f"{name} {parameter['name']}", parameter)
        for name, operation in operations(document)
        for parameter in operation.get("parameters", [])
    ]
    assert len(found) > 10
    assert [name for name, given in found if not is_one_line(given.get("description"))] == []


def test_every_operation_has_a_summary_and_a_description(document: JSON) -> None:
    for name, operation in operations(document):
        assert operation["description"].strip(), name
        # Left out, it is made of the name of a function: Every Word Begins Large.
        assert operation["summary"] != operation["summary"].title(), name


@pytest.mark.parametrize("model", REFUSED)
def test_a_field_that_is_refused_says_what_is_accepted(document: JSON, model: str) -> None:
    described = document["components"]["schemas"][model]["properties"]
    for field, accepted in REFUSED[model].items():
        assert described[field]["description"].endswith(
            f"not supported yet: only {accepted} is accepted."
        ), field
    unsaid = {
        field for field, schema in described.items() if "not supported yet" in schema["description"]
    }
    assert unsaid - REFUSED[model].keys() <= {"policy"}


def test_what_always_fails_is_not_offered(document: JSON) -> None:
    assert "/contexts/upload" not in document["paths"]
    compression = document["components"]["schemas"]["Compression"]["properties"]
    assert compression["policy"]["enum"] == list(get_args(PolicyName))
    messages = document["components"]["schemas"]["ContextCreate"]["properties"]["messages"]
    assert messages["type"] == "null"


def test_every_operation_but_health_takes_the_key_that_authorize_asks_for(document: JSON) -> None:
    ((name, scheme),) = document["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for operation_name, operation in operations(document):
        wanted = None if " /health/" in operation_name else [{name: []}]
        assert operation.get("security") == wanted, operation_name
