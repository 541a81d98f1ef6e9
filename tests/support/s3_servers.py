"""Two real S3 servers of different make, each started once for a run of the tests.

SeaweedFS checks signatures and has a reader that may not write; moto forgives more, keeps
everything in memory, and knows a missing bucket when it sees one.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

BUCKET = "kvkeep"
ACCESS_KEY, SECRET_KEY = "kvkeep-test", "kvkeep-test-secret"
READER_ACCESS_KEY, READER_SECRET_KEY = "kvkeep-reader", "kvkeep-reader-secret"
# Starting takes SeaweedFS 4 s, and 5 s more until it knows its own disk.
_START_SECONDS = 90
_SCRIPTS = Path(sysconfig.get_path("scripts"))


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where a server listens; every part of it is on this machine."""

    name: str
    endpoint: str

    def url(self, prefix: str, bucket: str = BUCKET, **options: str) -> str:
        """The store's URL of a prefix in a bucket."""
        query = urlencode({"endpoint": self.endpoint, "region": "us-east-1"} | options)
        return f"s3://{bucket}/{prefix}?{query}"

    def store(self, prefix: str | None = None, bucket: str = BUCKET) -> S3Store:
        """A client of its own, to arrange and check around the code under test."""
        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )


class Seaweed:
    """SeaweedFS on a directory that outlives its process; the ports stay when it comes back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._data.mkdir(parents=True)
        self._identities = folder / "identities.json"
        self._identities.write_text(json.dumps(_identities()))
        parts = ("master", "volume", "filer", "s3")
        ports = _free_ports(2 * len(parts))
        self._ports = {
            f"-{part}.port{kind}": ports.pop() for part in parts for kind in ("", ".grpc")
        }
        self.server = S3Server("seaweedfs", f"http://127.0.0.1:{self._ports['-s3.port']}")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return once an object can be stored."""
        command = [
            str(_SCRIPTS / "weed"),
            "server",
            f"-dir={self._data}",
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={self._identities}"),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20"),
            # Back in 2 s instead of 25.
            *("-master.raftHashicorp", "-master.electionTimeout=1s"),
            f"-filer.localSocket={self._folder / 'filer.sock'}",
            *(f"{option}={port}" for option, port in self._ports.items()),
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        _wait_until(lambda: _can_store(self.server), self._process, self._folder / "log")

    def kill(self) -> None:
        """SIGKILL; what was not on disk is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    """moto's S3 server, in memory."""
    [port] = _free_ports(1)
    server = S3Server("moto", f"http://127.0.0.1:{port}")
    command = [str(_SCRIPTS / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_until(lambda: _can_store(server), process, folder / "log")
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """The running SeaweedFS; whoever stops it starts it again."""
    folder = tmp_path_factory.mktemp("seaweed")
    running = Seaweed(folder)
    try:
        running.start()
        yield running
    finally:
        running.kill()
        # Its files are sparse, and large all the same.
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The running moto."""
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever may do everything, and no other setting of requests in it."""
    for name in tuple(os.environ):
        if name.startswith("AWS_") or name.upper() in ("HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(
    params=[
        pytest.param("seaweed", marks=pytest.mark.s3),
        pytest.param("moto_server", marks=pytest.mark.s3),
    ]
)
def s3_server(request: pytest.FixtureRequest, s3_credentials: None) -> S3Server:
    """Each of both servers in turn."""
    found = request.getfixturevalue(request.param)
    if isinstance(found, Seaweed):
        return found.server
    assert isinstance(found, S3Server)
    return found


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """The URL of an empty store on each of both servers in turn."""
    return s3_server.url(fresh_prefix())


def fresh_prefix() -> str:
    """A prefix that nothing is under yet; buckets are shared, since making one takes seconds."""
    return f"tests/{secrets.token_hex(8)}"


def _identities() -> dict[str, object]:
    def identity(access_key: str, secret_key: str, *actions: str) -> dict[str, object]:
        credentials = [{"accessKey": access_key, "secretKey": secret_key}]
        return {"name": access_key, "credentials": credentials, "actions": actions}

    return {
        "identities": [
            identity(ACCESS_KEY, SECRET_KEY, "Admin"),
            identity(READER_ACCESS_KEY, READER_SECRET_KEY, "Read", "List"),
        ]
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


def _can_store(server: S3Server) -> bool:
    # SeaweedFS makes a bucket when something is put into it, moto when it is asked to.
    with suppress(OSError):
        request = Request(f"{server.endpoint}/{BUCKET}", method="PUT", data=b"")
        urlopen(request, timeout=1).close()
    try:
        obstore.put(server.store(), "ready", b"1")
    except (BaseError, FileNotFoundError):
        return False
    return True


def _wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while not is_ready():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise RuntimeError(f"does not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)
