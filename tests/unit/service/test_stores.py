"""How the server opens its object store: at once, or refused in one line with exit code 2."""

import asyncio
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvkeep_service.config import Settings
from kvkeep_service.start_errors import SettingsInvalid
from kvkeep_service.stores import open_stores
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import ObjectsUnavailable

from ...support.s3_servers import S3Server
from ...support.server import Server, server_environment, start_command
from ...support.servers import silence, unused_url
from ...support.stores import entries_below

if TYPE_CHECKING:
    from kvkeep_service.engine.model import LoadedModel

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("s3_credentials")]

# Ten are promised; machines that run tests are busy.
_PATIENCE_SECONDS = 20


def _refusal(data: Path, url: str, *command: str) -> str:
    """The last line of a command that ends with 2, soon, and without a traceback."""
    began = time.monotonic()
    environment = server_environment(data=data, store=url, port=0)
    process = start_command(*command, environment=environment)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    assert time.monotonic() - began < _PATIENCE_SECONDS
    return said.strip().splitlines()[-1]


def test_field_32_a_server_whose_store_is_silent_or_away_is_refused_within_ten_seconds(
    tmp_path: Path,
) -> None:
    where = "kvkeep-server: KVKEEP_STORE: object store: s3://kvkeep/p at"
    with silence() as silent:
        line = _refusal(tmp_path / "data", S3Server("", silent).url("p"), "serve")
    assert line == f"{where} {silent}: no answer in 5 s"
    away = unused_url()
    line = _refusal(tmp_path, S3Server("", away).url("p"), "admin", "reindex")
    assert line.startswith(f"{where} {away}: cannot be read: ")


async def test_an_opening_that_is_given_up_at_any_moment_leaves_no_valkey(tmp_path: Path) -> None:
    async def opened(data: Path) -> None:
        async with open_stores(Settings(data=data)):
            await asyncio.Event().wait()

    # At once, as its thread begins, while Valkey starts, as it answers, and when all is open.
    for number, seconds in enumerate((0.0, 0.001, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.3)):
        server = Server(tmp_path / str(number))
        opening = asyncio.create_task(opened(server.data))
        await asyncio.sleep(seconds)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        assert not server.valkey_answers(), f"cancelled after {seconds} s"
        async with open_stores(Settings(data=server.data)):
            assert server.valkey_answers()


async def test_faults_are_loud_and_only_there_when_asked_for(tmp_path: Path) -> None:
    with capture_logs() as quiet:
        async with open_stores(Settings(data=tmp_path / "a")) as stores:
            await stores.objects.put("x", b"1")
    assert quiet == []
    with capture_logs() as loud:
        async with open_stores(Settings(data=tmp_path / "b", faults="flip=1,seed=3")) as stores:
            await stores.objects.put("x", b"1")
            assert await stores.objects.get("x") != b"1"
    assert [(line["event"], line["log_level"]) for line in loud] == [("faults_injected", "warning")]


async def test_faults_on_purpose_do_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    with capture_logs():
        async with open_stores(Settings(data=tmp_path / "a", faults="error=1,lost=1")) as stores:
            with pytest.raises(ObjectsUnavailable, match="injected"):
                await stores.objects.get("x")


async def test_a_failing_read_at_the_start_is_tried_again(
    tmp_path: Path, tiny: "LoadedModel"
) -> None:
    from kvkeep_service.app import running_application

    # With this seed a listing fails at first.
    settings = Settings(data=tmp_path / "a", faults="error=0.3,seed=6")
    with capture_logs():
        async with (
            open_stores(settings) as stores,
            running_application(settings, tiny, stores),
        ):
            assert await stores.metadata.store_id() is not None


async def test_a_data_directory_is_its_owners_alone_whatever_is_kept_elsewhere(
    tmp_path: Path,
) -> None:
    store = EmbeddedStore(tmp_path / "redis")
    store.start()
    try:
        for number, settings in enumerate(({}, {"redis_url": store.redis_url})):
            data = tmp_path / "new" / str(number)
            async with open_stores(Settings(data=data, **settings)) as stores:
                await stores.objects.put("x", b"1")
            assert stat.S_IMODE(data.stat().st_mode) == 0o700
        elsewhere = tmp_path / "unused"
        both = Settings(
            data=elsewhere, redis_url=store.redis_url, store=(tmp_path / "store").as_uri()
        )
        async with open_stores(both):
            pass
        assert not elsewhere.exists()
    finally:
        store.stop()


async def test_a_redis_out_of_reach_leaves_no_directory_of_a_store(tmp_path: Path) -> None:
    settings = Settings(
        data=tmp_path / "data",
        redis_url=f"unix://{tmp_path}/nothing.sock",
        store=(tmp_path / "store").as_uri(),
    )
    with pytest.raises(SettingsInvalid, match="KVKEEP_REDIS_URL: "):
        async with open_stores(settings):
            pass
    assert entries_below(tmp_path) == []
