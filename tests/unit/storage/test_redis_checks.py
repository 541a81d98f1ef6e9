import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep_storage.errors import Incompatible, MetadataUnavailable
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata, Started
from kvkeep_storage.redis_checks import check_server
from kvkeep_storage.redis_link import RedisLink

from ...support.redis_servers import ValkeyProcess, running
from .samples import CACHE, TENANT, a_cache, a_context

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with running(ValkeyProcess(tmp_path_factory.mktemp("valkey"))) as started:
        yield started


@pytest.fixture(autouse=True)
def _emptied(server: ValkeyProcess) -> None:
    server.call("FLUSHALL")


async def connect_and_close(url: str) -> None:
    await (await Metadata.connect(url)).close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("allkeys-lru", "any record"),
        ("volatile-ttl", "leases and idempotency keys"),
        ("noeviction", None),
    ],
)
async def test_field_28_a_redis_that_may_evict_our_keys_is_warned_of(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture, policy: str, told: str | None
) -> None:
    server.call("CONFIG", "SET", "maxmemory-policy", policy)
    await connect_and_close(server.url)
    found = warnings(caplog)
    assert len(found) == (told is not None)
    if told is not None:
        assert policy in found[0]
        assert told in found[0]


async def test_a_user_who_may_not_ask_is_served_without_a_warning(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    server.call("ACL", "SETUSER", "plain", "on", ">pw", "~*", "+@all", "-info", "-config")
    server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    caplog.set_level(logging.DEBUG, "kvkeep_storage")
    await connect_and_close(server.url.replace("//", "//plain:pw@"))
    server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert warnings(caplog) == []
    assert "INFO is not allowed" in caplog.text


async def test_a_user_who_may_not_write_is_named_at_the_start(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    server.call("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@all", "-@write")
    await connect_and_close(server.url.replace("//", "//reader:pw@"))
    (warning,) = warnings(caplog)
    assert "refuses writes" in warning


async def test_the_documented_permissions_are_enough(server: ValkeyProcess) -> None:
    document = (Path(__file__).parents[3] / "docs" / "redis.md").read_text()
    (rights,) = re.findall(r"The user needs\s`([^`]*)`", document)
    (patterns,) = re.findall(r"on the keys `([^`]*)`", document)
    rules = [*rights.split(), *patterns.split(), "+info"]
    server.call("ACL", "SETUSER", "service", "on", ">pw", *rules)
    metadata = await Metadata.connect(server.url.replace("//", "//service:pw@"))
    leases, jobs = Leases(metadata), Jobs(metadata, retry_seconds=0)
    await metadata.create_context(a_context())
    await metadata.patch_context(TENANT, "ctx_01", name="a name")
    await jobs.enqueue(TENANT, "ctx_01")
    job = await jobs.claim("w1", 0)
    assert job is not None
    assert await jobs.claim("w1", 0.01) is None
    await jobs.heartbeat(job, "w1")
    lease = await leases.acquire_build(TENANT, CACHE, "w1")
    assert lease is not None
    await leases.renew(lease)
    assert await metadata.flip(a_cache(), lease=lease, now=1.0) == ["ctx_01"]
    await leases.release(lease)
    async with leases.read_lease(TENANT, CACHE):
        assert await leases.readers(TENANT, CACHE) == 1
    assert await metadata.touch_context(TENANT, "ctx_01", 2.0)
    assert (await metadata.contexts(TENANT, limit=1)).records[0].status == "ready"
    assert await metadata.idempotency_begin(TENANT, "key", "digest", 60) == Started()
    assert await metadata.live_generations(TENANT) == {(CACHE, "gen1")}
    assert (await metadata.delete_context(TENANT, "ctx_01")).existed
    assert await jobs.ack(job)
    assert await jobs.reconcile(metadata) == 0
    await jobs.void_owners()
    await leases.void_all()
    await metadata.bind_store("store")
    await metadata.recount(TENANT)
    await metadata.close()


async def test_a_wrong_password_is_said_without_repeating_it(server: ValkeyProcess) -> None:
    with pytest.raises(MetadataUnavailable, match=r"(?i)password") as caught:
        await Metadata.connect(server.url.replace("//", "//nobody:s3cr3t@"))
    assert "s3cr3t" not in str(caught.value)


async def test_a_redis_that_only_reads_for_now_is_told_apart(server: ValkeyProcess) -> None:
    metadata = await Metadata.connect(server.url)
    await metadata.create_context(a_context())
    server.call("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        with pytest.raises(MetadataUnavailable, match="replicas"):
            await metadata.probe_writes()
        assert await metadata.context(TENANT, "ctx_01") is not None
    finally:
        server.call("CONFIG", "SET", "min-replicas-to-write", 0)
    await metadata.probe_writes()
    await metadata.close()


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("6.2.14", True), ("5.0.7", True), ("7.0.0", False), ("10.1", False), ("odd", False)],
)
async def test_a_redis_below_7_is_refused_in_one_clear_line(version: str, is_refused: bool) -> None:
    link = LinkTo(version)
    if not is_refused:
        await check_server(link)
        return
    with pytest.raises(Incompatible) as caught:
        await check_server(link)
    assert str(caught.value) == f"Redis version is {version}; 7 or newer is needed"


class LinkTo(RedisLink):
    """A link to a server of another version; there is none of that age to be had here."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def infos(self) -> list[dict[str, str]]:  # type: ignore[override]
        return [{"redis_version": "7.2.4"}, {"redis_version": self._version}]
