"""How the server opens its object store: at once, or refused in one line with exit code 2."""

import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvkeep_service.config import Settings
from kvkeep_service.stores import open_stores
from kvkeep_storage.errors import ObjectsUnavailable

from ...support.s3_servers import READER_ACCESS_KEY, READER_SECRET_KEY, S3Server, Seaweed
from ...support.server import server_environment, start_command
from ...support.servers import silence, unused_url

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("s3_credentials")]

_PATIENCE_SECONDS = 10


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
    where = "kvkeep-server: object store: s3://kvkeep/p at"
    with silence() as silent:
        line = _refusal(tmp_path / "data", S3Server("", silent).url("p"), "serve")
    assert line == f"{where} {silent}: no answer in 5 s"
    away = unused_url()
    line = _refusal(tmp_path / "data", S3Server("", away).url("p"), "admin", "reindex")
    assert line.startswith(f"{where} {away}: cannot be read: ")


@pytest.mark.s3
def test_a_store_with_another_key_bucket_or_right_is_refused_in_one_line(
    seaweed: Seaweed, moto_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(url: str) -> str:
        return _refusal(tmp_path / "data", url, "admin", "reindex")

    assert "NoSuchBucket" in refusal(moto_server.url("p", bucket="no-such-bucket"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_ACCESS_KEY)
    assert "403 Forbidden: SignatureDoesNotMatch" in refusal(seaweed.server.url("p"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET_KEY)
    assert "cannot be written to: " in refusal(seaweed.server.url("p"))


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
    with capture_logs(), pytest.raises(ObjectsUnavailable, match="injected"):
        async with open_stores(Settings(data=tmp_path / "c", faults="error=1")):
            pass
