"""Uploads and listings that are more than one request, on each S3 server."""

import asyncio
import random

import obstore
import pytest

from kvkeep_storage.concurrency import run_together
from kvkeep_storage.errors import Conflict, NotFound, ObjectsUnavailable
from kvkeep_storage.faults import Faults
from kvkeep_storage.objects import Objects
from kvkeep_storage.retries import retrying

from ...support.s3_servers import S3Server, Seaweed, fresh_prefix
from ...support.tcp_proxy import tcp_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.s3, pytest.mark.usefixtures("s3_credentials")]


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
