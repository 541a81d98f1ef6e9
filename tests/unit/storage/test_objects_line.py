"""What the line to a server can do wrong: a typed error within the deadline, never a hang."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvkeep_storage.errors import ObjectsUnavailable
from kvkeep_storage.objects import Objects
from kvkeep_storage.retries import ATTEMPTS, retrying

from ...support.object_calls import every_call
from ...support.s3_servers import S3Server, fresh_prefix
from ...support.tcp_proxy import TcpProxy, tcp_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.s3, pytest.mark.usefixtures("s3_credentials")]

DEADLINE_SECONDS = 3.0
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


async def test_field_32_a_line_that_goes_silent_ends_in_an_error_within_the_deadline(
    store: Objects, line: TcpProxy
) -> None:
    line.fall_silent()

    async def overdue(call: Callable[[], Awaitable[object]]) -> None:
        began = time.monotonic()
        with pytest.raises(ObjectsUnavailable, match="no answer"):
            await call()
        # A transfer is given time for its bytes.
        assert time.monotonic() - began < DEADLINE_SECONDS + len(CONTENT) / 2**22 + 2

    await asyncio.gather(*(overdue(call) for call in every_call(store, CONTENT)))


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

    await asyncio.gather(*(dropped(call) for call in every_call(store, CONTENT)))


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
    await asyncio.sleep(1.2)
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
