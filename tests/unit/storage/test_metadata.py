import asyncio
import os
import signal
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import (
    Invalid,
    MetadataUnavailable,
)
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.redis_link import RedisLink, Reply, Word

from .samples import TENANT, a_context, stored

pytestmark = pytest.mark.anyio
NOW = 1_790_000_500.75


async def process_id(url: str) -> int:
    async with Redis.from_url(url) as client:
        return int((await client.info("server"))["process_id"])


async def test_the_store_id_is_none_until_bound_and_can_be_bound_anew(metadata: Metadata) -> None:
    assert await metadata.store_id() is None
    await metadata.bind_store("one")
    assert await metadata.store_id() == "one"
    await metadata.bind_store("two")
    assert await metadata.store_id() == "two"


@pytest.mark.parametrize("url", ["redis+other://h:1/m", "http://h", "localhost:6379", ""])
async def test_an_unknown_scheme_is_named_and_the_password_is_not(url: str) -> None:
    with pytest.raises(ValueError, match="scheme") as caught:
        await Metadata.connect(url + "?password=secret" if url else url)
    assert "secret" not in str(caught.value)
    assert isinstance(caught.value, Invalid)


async def test_a_tenant_that_could_leave_its_slot_is_refused(metadata: Metadata) -> None:
    with pytest.raises(Invalid, match="tenant"):
        await metadata.context("a}b", "ctx_01")


async def test_nothing_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(MetadataUnavailable) as caught:
        await Metadata.connect(f"unix://{tmp_path}/none.sock")
    assert caught.value.retryable
    assert caught.value.code == "metadata_unavailable"


async def test_a_silent_server_is_unavailable_and_found_again_when_it_wakes(
    tmp_path: Path,
) -> None:
    store = EmbeddedStore(tmp_path)
    store.start()
    metadata = await Metadata.connect(store.redis_url, timeout_seconds=1)
    try:
        await metadata.create_context(a_context())
        pid = await process_id(store.redis_url)
        os.kill(pid, signal.SIGSTOP)
        try:
            outcomes = await asyncio.gather(
                metadata.context(TENANT, "ctx_01"),
                metadata.touch_context(TENANT, "ctx_01", NOW),
                metadata.contexts(TENANT, limit=1),
                return_exceptions=True,
            )
            assert {type(outcome) for outcome in outcomes} == {MetadataUnavailable}
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await stored(metadata, "ctx_01")).status == "queued"
    finally:
        await metadata.close()
        store.stop()


async def test_a_restarted_server_is_found_again_with_its_records_and_scripts(
    tmp_path: Path,
) -> None:
    store = EmbeddedStore(tmp_path)
    store.start()
    metadata = await Metadata.connect(store.redis_url)
    try:
        # Several connections, all of them stale afterwards.
        await asyncio.gather(
            *(metadata.create_context(a_context(f"ctx_{number}")) for number in range(5))
        )
        await asyncio.to_thread(store.stop)
        with pytest.raises(MetadataUnavailable):
            await metadata.unfinished()
        await asyncio.to_thread(store.start)
        records = await asyncio.gather(*(stored(metadata, f"ctx_{n}") for n in range(5)))
        assert [record.status for record in records] == ["queued"] * 5
        assert await metadata.touch_context(TENANT, "ctx_0", NOW)
    finally:
        await metadata.close()
        store.stop()


async def test_a_cancelled_call_leaves_the_connection_usable(metadata: Metadata) -> None:
    await metadata.create_context(a_context(name="mine"))
    for _ in range(20):
        call = asyncio.create_task(metadata.contexts(TENANT, limit=10))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await stored(metadata, "ctx_01")).name == "mine"


class ForgetfulLink(RedisLink):
    """Ends in a time-out where it was cancelled: asyncio.wait_for may, before Python 3.12."""

    async def _send(self, *words: Word) -> Reply:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            raise RedisTimeoutError from error
        return None


async def test_a_cancellation_that_ends_as_a_time_out_is_a_cancellation_still(
    valkey_url: str,
) -> None:
    link = ForgetfulLink.open(valkey_url, 2.0)
    call = asyncio.create_task(link.command("GET", "key"))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await link.close()


async def test_more_calls_at_once_than_connections_all_succeed(metadata: Metadata) -> None:
    await metadata.create_context(a_context())
    touched = await asyncio.gather(
        *(metadata.touch_context(TENANT, "ctx_01", NOW) for _ in range(300))
    )
    assert all(touched)
    assert (await stored(metadata, "ctx_01")).queries == 300
