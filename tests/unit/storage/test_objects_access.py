"""Servers that are away, refuse, are full or careless: one line that says so."""

import asyncio
import os
import time
import traceback

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvkeep_storage.errors import Full, ObjectsUnavailable
from kvkeep_storage.objects import Objects

from ...support.object_calls import every_call
from ...support.s3_servers import (
    READER_ACCESS_KEY,
    READER_SECRET_KEY,
    S3Server,
    Seaweed,
    fresh_prefix,
)
from ...support.servers import serving, silence, unused_url

pytestmark = [pytest.mark.anyio, pytest.mark.s3, pytest.mark.usefixtures("s3_credentials")]

CONTENT = b"content"


async def test_a_server_out_of_reach_is_named_in_one_line_in_time() -> None:
    for url in (unused_url(), "http://no-such-host.invalid:9000"):
        store = Objects.open(S3Server("nobody", url).url("prefix"))
        began = time.monotonic()
        with pytest.raises(ObjectsUnavailable) as error:
            await store.check(deadline_seconds=8)
        assert time.monotonic() - began < 9
        # A resolver that nobody answers takes as long as it is given.
        assert str(error.value).startswith(f"object store: s3://kvkeep/prefix at {url}: ")
        assert "\n" not in str(error.value)
    with silence() as url, pytest.raises(ObjectsUnavailable, match=r"no answer in 0\.5 s"):
        await Objects.open(S3Server("nobody", url).url("")).check(deadline_seconds=0.5)


async def test_a_missing_bucket_is_not_a_store_without_objects(moto_server: S3Server) -> None:
    gone = Objects.open(moto_server.url("prefix", bucket="no-such-bucket"))
    for call in every_call(gone, CONTENT):
        with pytest.raises(ObjectsUnavailable, match="NoSuchBucket"):
            await call()


async def test_a_bucket_that_seaweedfs_does_not_have_is_no_store(seaweed: Seaweed) -> None:
    gone = Objects.open(seaweed.server.url("prefix", bucket="no-such-bucket"))
    for call in (gone.get("x"), gone.size("x"), gone.objects_below("")):
        with pytest.raises(ObjectsUnavailable, match="NoSuchBucket"):
            await call


async def test_wrong_credentials_are_said_and_never_repeated(
    seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "wrong-token")
    store = Objects.open(seaweed.server.url(fresh_prefix()))
    for call in [*every_call(store, CONTENT), lambda: store.check(deadline_seconds=8)]:
        with pytest.raises(ObjectsUnavailable, match="403") as error:
            await call()
        text = "".join(traceback.format_exception(error.value))
        for secret in ("wrong-secret", "wrong-token", os.environ["AWS_ACCESS_KEY_ID"]):
            assert secret not in text
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(ObjectsUnavailable, match=r"cannot be read: .*InvalidAccessKeyId"):
        await Objects.open(seaweed.server.url("x")).check(deadline_seconds=8)


async def test_a_store_that_may_only_be_read_says_so(
    seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = seaweed.server.url(fresh_prefix())
    await Objects.open(url).put("x", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET_KEY)
    reader = Objects.open(url)
    assert await reader.get("x") == b"1"
    with pytest.raises(ObjectsUnavailable, match=r"cannot be written to: .*AccessDenied"):
        await reader.check(deadline_seconds=8)


async def test_without_credentials_it_is_said_which_to_set(
    seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # Where a machine of a cloud would give some.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", unused_url())
    store = Objects.open(seaweed.server.url(fresh_prefix()))
    with pytest.raises(ObjectsUnavailable, match="no credentials: set AWS_ACCESS_KEY_ID and"):
        await store.check(deadline_seconds=8)
    anonymous = Objects.open(seaweed.server.url(fresh_prefix(), anonymous="true"))
    with pytest.raises(ObjectsUnavailable, match=r"cannot be read: .*403 Forbidden: AccessDenied"):
        await anonymous.check(deadline_seconds=8)


@pytest.mark.parametrize(
    "name", ["AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"]
)
async def test_what_cannot_stand_in_a_request_is_said_and_not_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a file of a secret gives it.
    monkeypatch.setenv(name, "secret-word\n")
    with pytest.raises(ObjectsUnavailable, match="does a value end in a line break") as refused:
        await Objects.open("s3://bucket/prefix").check(deadline_seconds=8)
    assert "secret-word" not in str(refused.value)


@pytest.mark.parametrize(
    ("path_style", "asked"),
    [
        ("true", "http://s3.test:9000/bucket/prefix/a/x"),
        ("false", "http://bucket.s3.test:9000/prefix/a/x"),
    ],
)
async def test_field_31_style_and_region_of_requests_are_those_of_the_url(
    path_style: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[str] = []

    async def take_down(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.close()

    # Names that nobody resolves reach whoever stands in for every host.
    async with await asyncio.start_server(take_down, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        url = S3Server("nobody", "http://s3.test:9000").url(
            "prefix", bucket="bucket", path_style=path_style, region="eu-north-9"
        )
        with pytest.raises(ObjectsUnavailable):
            await Objects.open(url).size("a/x")
    assert heads[0].startswith(f"HEAD {asked} HTTP/1.1\r\n")
    assert "/eu-north-9/s3/aws4_request" in heads[0]


async def test_plain_http_needs_to_be_asked_for_in_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", unused_url())
    with pytest.raises(ObjectsUnavailable, match="only where the endpoint in the store's URL says"):
        await Objects.open("s3://bucket/prefix").get("x")


@pytest.mark.parametrize(
    ("status", "code"),
    [(507, "InsufficientStorage"), (507, "XMinioStorageFull"), (403, "QuotaExceeded")],
)
async def test_a_server_without_space_is_full(status: int, code: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    with serving(_answering(status, body)) as url:
        store = Objects.open(S3Server("full", url).url("prefix"))
        with pytest.raises(Full) as full:
            await store.put("x", b"1234")
    assert (full.value.name, full.value.size_bytes) == ("x", 4)


async def test_field_34_a_server_that_ignores_the_condition_of_a_put_is_no_store() -> None:
    body = "<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
    with serving(_answering(200, body)) as url:
        store = Objects.open(S3Server("careless", url).url("prefix"))
        with pytest.raises(ObjectsUnavailable, match="overwrites an object that was to be left"):
            await store.check(deadline_seconds=8)


def _answering(status: int, body: str) -> Starlette:
    async def answer(request: Request) -> Response:
        await request.body()
        return Response(body, status, {"ETag": '"e"'}, media_type="application/xml")

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "PUT", "DELETE"])])
