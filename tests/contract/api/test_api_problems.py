"""Requests that cannot be served: every one of them is answered with a problem of its own."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ...support.api_server import ApiServer, api_server
from .answers import UNKNOWN, problem

LIMIT_BYTES = 4096
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("small"), body_limit_bytes=LIMIT_BYTES) as server:
        yield server


def post(api: ApiServer, content: bytes, path: str = "/contexts", **headers: str) -> Any:
    return api.client.post(path, content=content, headers={**JSON, **headers})


# --- text that is none -------------------------------------------------------------------------

SURROGATES = [
    (b'{"document": "a\xff"}', "body"),
    (b'{"document": "\xc3\x28"}', "body"),
    (b'{"document": "\xed\xa0\x80"}', "document"),
    (b'{"document": "\\ud800"}', "document"),
    (b'{"document": "x", "name": "\\udc00"}', "name"),
    (b'{"document": "x", "system": "\\ud83d"}', "system"),
    (b'{"document": "x", "metadata": {"a": "\\ud83d"}}', "metadata.a"),
    (b'{"document": "x", "metadata": {"\\ud83d": "a"}}', "metadata"),
    (b'{"documents": [{"name": "n", "text": "\\ud83d"}]}', "documents.0.text"),
    (b'{"document": "x", "\\ud83d": "a"}', "body"),
]


@pytest.mark.parametrize(("content", "field"), SURROGATES)
def test_text_that_is_no_unicode_is_refused(api: ApiServer, content: bytes, field: str) -> None:
    response = post(api, content)
    body = problem(response)
    assert (response.status_code, body["code"]) == (422, "invalid_encoding")
    assert body["field"] == field


@pytest.mark.parametrize(
    "content",
    [
        b'{"question": "\\ud800"}',
        b'{"question": "x", "stop": ["\\ud800"]}',
        b'{"question": "x", "chat_template_kwargs": {"a": [{"b": "\\ud800"}]}}',
        b'{"question": "x", "system": "\xfe"}',
    ],
)
def test_the_same_goes_for_questions(api: ApiServer, content: bytes) -> None:
    response = post(api, content, f"/contexts/{UNKNOWN}/query")
    assert (response.status_code, problem(response)["code"]) == (422, "invalid_encoding")


def test_nul_and_every_plane_of_unicode_are_text(api: ApiServer) -> None:
    text = "a\0b \u2028 \uffff \U0001f642 \U0010ffff é"
    context = api.create(document=text, name=text, metadata={text: text})
    assert (context["name"], context["metadata"]) == (text, {text: text})
    document = api.client.get(f"/contexts/{context['id']}/document").json()
    assert document["document"] == text


@pytest.mark.parametrize("document", ["", " \n\t", "\u2003"])
def test_an_empty_document_is_refused(api: ApiServer, document: str) -> None:
    response = api.client.post("/contexts", json={"document": document})
    body = problem(response)
    assert (response.status_code, body["code"]) == (422, "empty_document")
    assert body["field"] == "document"


@pytest.mark.parametrize(
    ("asked", "told"),
    [("limit=0", "limit: must be from 1 to 100"), ("limit=101", "limit: must be from 1 to 100")],
)
def test_a_parameter_out_of_bounds_is_told_both_of_them(
    api: ApiServer, asked: str, told: str
) -> None:
    response = api.client.get(f"/contexts?{asked}")
    assert (response.status_code, problem(response)["detail"]) == (422, told)


@pytest.mark.parametrize("seconds", ["-1", "300.5"])
def test_a_wait_out_of_bounds_is_told_both_of_them(api: ApiServer, seconds: str) -> None:
    response = api.client.post(f"/contexts?wait={seconds}", json={"document": "words"})
    assert problem(response)["detail"] == "wait: must be from 0 to 300"


# --- bodies that are none ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"document": }',
        b"[]",
        b'"text"',
        b"null",
        b'{"document": "x"} {}',
        b"[" * 100_000,
        b'{"wait": ' + b"9" * 5000 + b', "document": "x"}',
        b'{"document": "x", "compression": {"ratio": NaN}}',
        b'{"document": "x", "chat": {}}',
    ],
)
def test_a_body_that_is_no_request_is_refused(api: ApiServer, content: bytes) -> None:
    response = post(api, content)
    body = problem(response)
    assert (response.status_code, body["code"]) == (422, "invalid_request")
    assert body["errors"]
    assert "function-" not in response.text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "line 1, column 2 (character 1): Expecting property name"),
        (b'{\n  "document": "a secret"\n  "name": "x"\n}', "line 3, column 3 (character 29): "),
        (b'{"document": "\xc3\xa4\xc3\xb6", }', "column 20 (character 19): "),
        (b'{"document": "a\nsecret"}', "line 1, column 16 (character 15): Invalid control"),
        (b'{"document": "x"} {}', "line 1, column 19 (character 18): Extra data"),
    ],
    ids=["opened", "a line below", "after umlauts", "a raw line end", "two of them"],
)
def test_a_body_that_stops_being_json_is_told_where(
    api: ApiServer, content: bytes, told: str
) -> None:
    refused = problem(post(api, content))
    assert (refused["status"], refused["code"]) == (422, "invalid_request")
    (error,) = refused["errors"]
    assert error["field"] == "body"
    assert error["reason"].startswith("is not JSON at line ")
    assert told in error["reason"]
    assert "secret" not in json.dumps(refused)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 100_000, "body: is nested more than 100 deep"),
        (b'{"wait": ' + b"9" * 5000 + b"}", "body: has a number of more than 4300 digits"),
    ],
    ids=["too deep", "too many digits"],
)
def test_a_body_beyond_what_is_parsed_is_told_the_limit(
    api: ApiServer, content: bytes, told: str
) -> None:
    assert problem(post(api, content))["detail"] == told


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e400"])
@pytest.mark.parametrize("around", [(b"", b""), (b'{"b": [', b"]}")], ids=["bare", "nested"])
def test_no_number_of_a_question_is_nan_or_infinite(
    api: ApiServer, number: bytes, around: tuple[bytes, bytes]
) -> None:
    value = number.join(around)
    content = b'{"question": "x", "chat_template_kwargs": {"a": ' + value + b"}}"
    refused = problem(post(api, content, f"/contexts/{UNKNOWN}/query"))
    assert refused["detail"] == "chat_template_kwargs.a: must hold finite numbers only"


@pytest.mark.parametrize("route", ["rebuild", "prefetch"])
@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 404), (b" {}\n", 404), (b'{"ratio": 0.5}', 422), (b"null", 422), (b"\xff", 422)],
    ids=["nothing", "an empty object", "an option", "null", "no text"],
)
def test_no_option_is_taken_and_ignored_where_there_are_none(
    api: ApiServer, route: str, content: bytes, status: int
) -> None:
    response = post(api, content, f"/contexts/{UNKNOWN}/{route}")
    assert response.status_code == status
    if status == 422:
        assert problem(response)["detail"] == "body: must be empty: there are no options here"


def test_every_refused_field_is_named_with_its_path(api: ApiServer) -> None:
    body = {
        "document": "x",
        "colour": "red",
        "compression": {"ratio": "0.3", "speed": 1},
        "protect": [{"start": 0, "end": "1"}],
    }
    refused = problem(api.client.post("/contexts", json=body))
    assert [error["field"] for error in refused["errors"]] == [
        "protect.0.end",
        "compression.ratio",
        "compression.speed",
        "colour",
    ]


def test_a_refused_document_is_not_repeated(api: ApiServer) -> None:
    secret = "the text of a secret document"
    for body in ({"document": [secret]}, {"document": secret, "name": 7}, {"messages": secret}):
        response = api.client.post("/contexts", json=body)
        assert response.status_code == 422
        assert secret not in response.text


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application"],
)
@pytest.mark.parametrize("path", ["/contexts", f"/contexts/{UNKNOWN}/query"])
def test_a_body_that_is_not_declared_as_json_is_refused(
    api: ApiServer, path: str, content_type: str
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = api.client.post(path, content=b'{"document": "x"}', headers=headers)
    assert (response.status_code, problem(response)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"]
)
def test_json_may_be_declared_in_any_way_that_is_json(api: ApiServer, content_type: str) -> None:
    response = post(api, b'{"document": "a b c d e"}', **{"content-type": content_type})
    assert response.status_code in (200, 202)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_json_in_another_encoding_is_refused(api: ApiServer, encoding: str) -> None:
    response = post(api, '{"document": "a b c d e"}'.encode(encoding))
    assert (response.status_code, problem(response)["code"]) == (422, "invalid_encoding")


# --- bodies that are too large -----------------------------------------------------------------


def too_large(response: Any) -> None:
    body = problem(response)
    assert (response.status_code, body["code"]) == (413, "body_too_large")
    assert body["limit_bytes"] == LIMIT_BYTES


def test_a_body_up_to_the_limit_is_read(small: ApiServer) -> None:
    content = json.dumps({"document": "x"}).encode()
    content += b" " * (LIMIT_BYTES - len(content))
    assert post(small, content).status_code in (200, 202)
    too_large(post(small, content + b" "))


def test_a_body_far_over_the_limit_still_gets_its_answer(small: ApiServer) -> None:
    too_large(post(small, b" " * LIMIT_BYTES * 2))


def test_a_body_that_hides_its_length_is_refused_while_it_streams(small: ApiServer) -> None:
    chunks = iter([b" " * 1000] * 6)
    response = small.client.post("/contexts", content=chunks, headers=JSON)
    assert response.request.headers["transfer-encoding"] == "chunked"
    too_large(response)


def test_a_body_of_32_mib_is_within_the_usual_limit(api: ApiServer) -> None:
    content = b'{"document": "%s"}' % (b"word " * 2000)
    content += b" " * (32 * 2**20 - len(content))
    assert post(api, content).json()["code"] == "document_too_long"
    assert post(api, content + b" ").json()["code"] == "body_too_large"


# --- paths, methods, ids -----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/context", "/contexts/", f"/contexts/{UNKNOWN}/nothing"])
def test_a_path_that_leads_nowhere_is_not_found(api: ApiServer, path: str) -> None:
    response = api.client.get(path)
    assert (response.status_code, problem(response)["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/contexts"), ("DELETE", "/contexts"), ("GET", f"/contexts/{UNKNOWN}/query")],
)
def test_a_method_that_is_not_there_is_not_allowed(api: ApiServer, method: str, path: str) -> None:
    response = api.client.request(method, path)
    assert (response.status_code, problem(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/contexts?wiat=3"),
        ("POST", "/contexts?wait=301"),
        ("POST", "/contexts?wait=nan"),
        ("POST", f"/contexts/{UNKNOWN}/query?wait=-1"),
        ("GET", f"/contexts/{UNKNOWN}?fields=id"),
        ("DELETE", f"/contexts/{UNKNOWN}?force=1"),
    ],
)
def test_a_parameter_that_means_nothing_is_refused(api: ApiServer, method: str, path: str) -> None:
    body = {"document": "x"} if path.startswith("/contexts?") else {"question": "x"}
    response = api.client.request(method, path, json=body if method == "POST" else None)
    assert (response.status_code, problem(response)["code"]) == (422, "invalid_request")


def test_every_answer_carries_a_request_id(api: ApiServer) -> None:
    for path in ("/health/live", "/contexts", "/nowhere", f"/contexts/{UNKNOWN}"):
        assert api.client.get(path).headers["x-request-id"].startswith("req_")
        given = api.client.get(path, headers={"X-Request-Id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"


def test_bytes_that_are_no_http_harm_nobody(api: ApiServer) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.putrequest("POST", "/contexts", skip_host=True)
    connection.putheader("content-length", "-1")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()
    assert api.client.get("/health/live").status_code == 200
