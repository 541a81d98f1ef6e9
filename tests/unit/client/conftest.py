from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvkeep_client import Contexts, KVKeep
from kvkeep_client.commands import app
from kvkeep_client.transport import Transport

from ...support.servers import serving
from .stand_in import StandIn

Run = Callable[..., Result]


@dataclass
class Served:
    """A stand-in that runs, and where."""

    server: StandIn
    url: str


@dataclass
class Unhurried:
    """Contexts whose client notes its pauses instead of taking them."""

    contexts: Contexts
    transport: Transport
    pauses: list[float]


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVKEEP_URL", "KVKEEP_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served() -> Iterator[Served]:
    server = StandIn()
    with serving(server.app()) as url:
        yield Served(server, url)


@pytest.fixture
def server(served: Served) -> StandIn:
    return served.server


@pytest.fixture
def kv(served: Served) -> Iterator[KVKeep]:
    with KVKeep(served.url) as kv:
        yield kv


@pytest.fixture
def unhurried(served: Served) -> Iterator[Unhurried]:
    pauses: list[float] = []
    transport = Transport(served.url, None, timeout_seconds=30, max_retries=2, sleep=pauses.append)
    yield Unhurried(Contexts(transport), transport, pauses)
    transport.close()


@pytest.fixture
def run(served: Served) -> Run:
    """Call a command on the stand-in."""

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments, env={"KVKEEP_URL": served.url})

    return call


@pytest.fixture
def lease(tmp_path: Path) -> Path:
    path = tmp_path / "lease.txt"
    path.write_text("The lease ends on 31 March 2029.", encoding="utf-8")
    return path
