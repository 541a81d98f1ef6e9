"""The real server as a process of its own, on a data directory that outlives it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx2

from kvkeep_storage.embedded import EmbeddedStore

# For machines busy with other things; nothing here measures speed.
START_SECONDS = 180
STOP_SECONDS = 60
PATIENCE_SECONDS = 180
# Settings of a sweeper that removes what may be removed as soon as no write takes that long.
EAGER_SWEEPS = {"sweep_grace_seconds": 5, "sweep_interval_seconds": 1}
_READY = "kvkeep is ready at "


class Server:
    """``kvkeep-server serve`` on the embedded store; each start is a new process and port.

    Leaving the ``with`` block ends server and Valkey, however they are. What the processes say
    goes to a file beside the data directory, all starts together.
    """

    def __init__(self, data: Path, *, model: str | Path = "bundled", **settings: object) -> None:
        """``settings`` are those of the server, by their names in lower case."""
        self.data = data
        self.model = model
        self.objects = data / "objects"
        self.log_path = data.with_name(f"{data.name}.log")
        self._environment = server_environment(model=model, data=data, port=0, **settings)
        self._process: subprocess.Popen[str] | None = None
        self._http: httpx2.Client | None = None

    @property
    def http(self) -> httpx2.Client:
        """A client of the running process."""
        assert self._http is not None, "the server was not started"
        return self._http

    @property
    def url(self) -> str:
        """Where the running process answers."""
        return str(self.http.base_url).rstrip("/")

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that was said on standard error so far."""
        return self.log_path.read_text()

    def start(self) -> Self:
        """Start a process and return once it says that it is ready."""
        assert self._process is None, "the server runs already"
        with self.log_path.open("a") as log:
            process = start_command("serve", environment=self._environment, stderr=log)
        self._process = process
        overdue = threading.Timer(START_SECONDS, process.kill)
        overdue.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        overdue.cancel()
        assert line.startswith(_READY), f"{line}{self.log}"
        url = line.removeprefix(_READY).strip()
        self._http = httpx2.Client(base_url=url, timeout=PATIENCE_SECONDS)
        return self

    def kill(self) -> None:
        """SIGKILL: nothing of the process runs after this; its Valkey lives on."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; return the exit code. A process that does not end fails the test."""
        return self._end(signal.SIGTERM)

    def __enter__(self) -> Self:
        """Start."""
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End everything."""
        self.close()

    def close(self) -> None:
        """End server and Valkey, whatever state they are in; ``terminate`` tests a clean stop."""
        if self._process is not None:
            self.kill()
        if self.valkey_answers():
            store = EmbeddedStore(self.data)
            store.start()
            store.stop()

    def create(self, document: str, **fields: object) -> dict[str, Any]:
        """Register a document and return its context once that is ready."""
        created = self.register(document, wait=PATIENCE_SECONDS, **fields)
        assert created["status"] == "ready", created
        return created

    def register(self, document: str, **fields: object) -> dict[str, Any]:
        """Register a document and return its context as it is then."""
        response = self.http.post("/contexts", json={"document": document, **fields})
        assert response.status_code in (200, 202), response.text
        context: dict[str, Any] = response.json()
        return context

    def context(self, context_id: str) -> dict[str, Any]:
        """Look a context up."""
        response = self.http.get(f"/contexts/{context_id}")
        assert response.status_code == 200, response.text
        context: dict[str, Any] = response.json()
        return context

    def query(self, context_id: str, question: str, **fields: object) -> httpx2.Response:
        """Ask, and return the response, whatever it is."""
        body = {"question": question, "return_token_ids": True, "max_tokens": 16, **fields}
        return self.http.post(f"/contexts/{context_id}/query", json=body)

    def ask(self, context_id: str, question: str, **fields: object) -> dict[str, Any]:
        """Ask, greedily and with token ids unless ``fields`` say otherwise; return the answer."""
        response = self.query(context_id, question, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def generations(self) -> list[Path]:
        """Every stored generation, referred to or not."""
        return sorted(path for path in self.objects.glob("caches/*/*/*") if path.is_dir())

    def valkey_answers(self) -> bool:
        """Whether the Valkey of this data directory is alive."""
        try:
            return self.valkey("PING").startswith("+PONG")
        except OSError:
            return False

    def valkey(self, command: str) -> str:
        """Send one command to the embedded Valkey, around the server."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.data / "valkey" / "valkey.sock"))
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(4096).decode()

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None, "the server does not run"
        if self._http is not None:
            self._http.close()
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()
            self._process = None


def server_environment(**settings: object) -> dict[str, str]:
    """The environment of a command that sees these settings and none of the caller's own."""
    kept = ("KVKEEP_MODEL_CACHE", "KVKEEP_KERNELS")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith("KVKEEP_")
    }
    given = {f"KVKEEP_{name.upper()}": str(value) for name, value in settings.items()}
    # Models are local: a look-up that is refused fails now, not after a time-out.
    return {**environment, "HF_HUB_OFFLINE": "1", **given}


def start_command(
    *arguments: str, environment: Mapping[str, str], stderr: IO[str] | int = subprocess.PIPE
) -> "subprocess.Popen[str]":
    """Start ``kvkeep-server`` as installed beside this Python."""
    command = Path(sys.executable).with_name("kvkeep-server")
    return subprocess.Popen(
        [str(command), *arguments],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def eventually(claim: Callable[[], object], *, poll_seconds: float = 0.05) -> None:
    """Return once ``claim`` is true; fail when it has not become so for very long."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < give_up_at, "it has not become true"
        time.sleep(poll_seconds)
