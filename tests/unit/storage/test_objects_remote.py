"""What a server, or the line to it, can do wrong: a typed error within the deadline, no hang."""

import asyncio
import os
import random
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable

import obstore
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvkeep_storage.concurrency import run_together
from kvkeep_storage.errors import Conflict, Full, NotFound, ObjectsUnavailable
from kvkeep_storage.faults import Faults
from kvkeep_storage.objects import Objects
from kvkeep_storage.retries import ATTEMPTS, retrying

from ...support.s3_servers import (
    READER_ACCESS_KEY,
    READER_SECRET_KEY,
    S3Server,
    Seaweed,
    fresh_prefix,
)
from ...support.servers import serving, silence, unused_url
from ...support.tcp_proxy import TcpProxy, tcp_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.s3, pytest.mark.usefixtures("s3_credentials")]

DEADLINE_SECONDS = 1.5
CONTENT = random.Random(5).randbytes(3 * 2**20)


@pytest.fixture
async def line(moto_server: S3Server) -> AsyncIterator[TcpProxy]:
    async with tcp_proxy(moto_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
async def store(line: TcpProxy) -> Objects:
    """A store at the other end of the line, with an object ``x`` in it."""
    url = S3Server("line", line.url).url(fresh_prefix())
    opened = Objects.open(url, deadline_seconds=DEADLINE_SECONDS)
    await opened.put("x", CONTENT)
    return opened


def _calls(store: Objects) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: store.get("x"),
        lambda: store.put("x", CONTENT),
        lambda: store.put_if_absent("y", b"1"),
        lambda: store.size("x"),
        lambda: store.delete("x"),
        lambda: store.objects_below("a"),
        lambda: store.directories_below("a"),
        lambda: store.read_ranges("x", 0, [memoryview(bytearray(len(CONTENT)))]),
        lambda: store.check(deadline_seconds=DEADLINE_SECONDS),
    ]


async def test_field_32_a_line_that_goes_silent_ends_in_an_error_within_the_deadline(
    store: Objects, line: TcpProxy
) -> None:
    line.fall_silent()

    async def overdue(call: Callable[[], Awaitable[object]]) -> None:
        began = time.monotonic()
        with pytest.raises(ObjectsUnavailable, match="no answer"):
            await call()
        # A transfer is given time for its bytes.
        assert time.monotonic() - began < DEADLINE_SECONDS + len(CONTENT) / 2**22 + 0.5

    await asyncio.gather(*(overdue(call) for call in _calls(store)))


async def test_field_09_an_answer_cut_short_is_completed_or_an_error_never_accepted(
    store: Objects, line: TcpProxy
) -> None:
    # Enough for the client to go on from where it was cut.
    line.answer_bytes = 2**20 + 2**19
    into = bytearray(len(CONTENT))
    await store.read_ranges("x", 0, [memoryview(into)])
    assert into == CONTENT
    assert await store.get("x") == CONTENT
    # More cuts than it has attempts.
    line.answer_bytes = 2**18
    with pytest.raises(ObjectsUnavailable) as short:
        await store.read_ranges("x", 0, [memoryview(bytearray(len(CONTENT)))])
    assert not short.value.abandoned
    with pytest.raises(ObjectsUnavailable):
        await store.get("x")


async def test_a_line_that_drops_every_connection_is_unavailable(
    store: Objects, line: TcpProxy
) -> None:
    line.answer_bytes = 0

    async def dropped(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(ObjectsUnavailable):
            await call()

    await asyncio.gather(*(dropped(call) for call in _calls(store)))


async def test_a_line_that_only_delays_loses_nothing(store: Objects, line: TcpProxy) -> None:
    line.delay_seconds = 0.02
    await store.put("y", CONTENT)
    into = bytearray(len(CONTENT))
    await store.read_ranges("y", 0, [memoryview(into)])
    assert into == CONTENT


async def test_a_silence_shorter_than_the_deadline_is_survived(
    store: Objects, line: TcpProxy
) -> None:
    line.fall_silent()
    reading = asyncio.create_task(store.get("x"))
    await asyncio.sleep(0.7)
    # The client has given the silent connection up, and asked again on another.
    line.speak()
    assert await reading == CONTENT


async def test_retries_of_two_levels_share_one_number_of_attempts(
    store: Objects, line: TcpProxy
) -> None:
    line.answer_bytes = 0
    before = line.connections
    with pytest.raises(ObjectsUnavailable):
        await retrying(lambda: store.size("x"))
    assert line.connections - before == ATTEMPTS


async def test_a_server_out_of_reach_is_named_in_one_line_in_time() -> None:
    for url in (unused_url(), "http://no-such-host.invalid:9000"):
        store = Objects.open(S3Server("nobody", url).url("prefix"))
        began = time.monotonic()
        with pytest.raises(ObjectsUnavailable) as error:
            await store.check(deadline_seconds=8)
        assert time.monotonic() - began < 9
        assert f"s3://kvkeep/prefix at {url}: cannot be read" in str(error.value)
        assert "\n" not in str(error.value)
    with silence() as url, pytest.raises(ObjectsUnavailable, match=r"no answer in 0\.5 s"):
        await Objects.open(S3Server("nobody", url).url("")).check(deadline_seconds=0.5)


async def test_a_missing_bucket_is_not_a_store_without_objects(moto_server: S3Server) -> None:
    gone = Objects.open(moto_server.url("prefix", bucket="no-such-bucket"))
    for call in _calls(gone):
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
    for call in [*_calls(store), lambda: store.check(deadline_seconds=8)]:
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


@pytest.mark.parametrize("checksum", ["sha256", "crc64nvme"])
async def test_field_31_uploads_with_a_checksum_are_taken(
    checksum: str, s3_server: S3Server
) -> None:
    store = Objects.open(s3_server.url(fresh_prefix(), checksum=checksum))
    content = random.Random(1).randbytes(9 * 2**20)
    await store.put("large", content)
    await store.put_if_absent("small", b"1")
    assert await store.get("large") == content
    assert await store.get("small") == b"1"


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


async def test_a_server_killed_in_mid_upload_and_back_has_the_object_whole_or_not_at_all(
    seaweed: Seaweed,
) -> None:
    prefix = fresh_prefix()
    store = Objects.open(seaweed.server.url(prefix))
    content = random.Random(9).randbytes(40 * 2**20)
    await store.put("before", b"1")
    async with tcp_proxy(seaweed.server.endpoint) as line:
        url = S3Server("line", line.url).url(prefix)
        upload = asyncio.create_task(Objects.open(url).put("slab", content))
        await line.until_asked(10 * 2**20)
        seaweed.kill()
        with pytest.raises(ObjectsUnavailable):
            await upload
    await asyncio.to_thread(seaweed.start)
    assert await store.get("before") == b"1"
    with pytest.raises(NotFound):
        await store.size("slab")
    # The same call later is what an error of this kind promises.
    await retrying(lambda: store.put("slab", content))
    assert await store.size("slab") == len(content)
    assert await store.get("slab") == content


async def test_an_upload_whose_connections_break_goes_on_with_the_parts_that_were_lost(
    s3_server: S3Server,
) -> None:
    content = random.Random(9).randbytes(40 * 2**20)
    async with tcp_proxy(s3_server.endpoint) as line:
        store = Objects.open(S3Server("line", line.url).url(fresh_prefix()))
        upload = asyncio.create_task(store.put("slab", content))
        await line.until_asked(10 * 2**20)
        line.cut()
        await upload
        assert await store.size("slab") == len(content)
        assert await store.get("slab") == content


async def test_only_what_is_put_without_a_condition_goes_up_in_parts(s3_server: S3Server) -> None:
    prefix = fresh_prefix()
    store, behind = Objects.open(s3_server.url(prefix)), s3_server.store(prefix)
    content = random.Random(9).randbytes(17 * 2**20)
    await store.put("slab", content)
    await store.put_if_absent("manifest", content)
    # The tag of what came in parts says in how many.
    assert str((await obstore.head_async(behind, "slab"))["e_tag"]).endswith('-3"')
    assert "-" not in str((await obstore.head_async(behind, "manifest"))["e_tag"])


async def test_field_34_the_condition_of_a_put_holds_for_any_size(s3_server: S3Server) -> None:
    store = Objects.open(s3_server.url(fresh_prefix()))
    first, second = bytes(9 * 2**20), b"1" * (9 * 2**20)
    await store.put_if_absent("manifest", first)
    with pytest.raises(Conflict):
        await store.put_if_absent("manifest", second)
    assert await store.get("manifest") == first


async def test_field_33_a_lost_reply_to_the_end_of_an_upload_is_decided_by_what_is_stored(
    s3_server: S3Server,
) -> None:
    lossy = Objects.open(s3_server.url(fresh_prefix()), faults=Faults(lost=1.0))
    content = random.Random(9).randbytes(9 * 2**20)
    with pytest.raises(ObjectsUnavailable, match="the reply is lost"):
        await lossy.put("slab", content)
    assert await lossy.size("slab") == len(content)
    with pytest.raises(ObjectsUnavailable, match="the reply is lost"):
        await lossy.put_if_absent("manifest", b"1")
    with pytest.raises(Conflict):
        await lossy.put_if_absent("manifest", b"1")
    assert await lossy.get("manifest") == b"1"


async def test_listings_of_more_than_a_page_are_whole(seaweed: Seaweed) -> None:
    store = Objects.open(seaweed.server.url(fresh_prefix()))
    names = [f"{n:04d}" for n in range(1003)]
    await run_together((store.put(f"a/{name}/x", b"1") for name in names), limit=32)
    assert sorted(await store.directories_below("a")) == names
    found = await store.objects_below("a")
    assert sorted(item.key for item in found) == [f"a/{name}/x" for name in names]
