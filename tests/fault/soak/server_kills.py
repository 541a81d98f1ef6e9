"""A real server with a tiny random model, used over HTTP by several threads and killed.

Every answer is compared with the first one to the same question on the same document; a random
model answers every document and question differently, so a foreign or torn cache would show.
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from kvkeep_storage import durable

from ...support.documents import contract
from ...support.server import EAGER_SWEEPS, Server, eventually
from ...support.stores import files_below
from ...support.tiny_models import save_tiny_model

QUESTIONS = ("Who pays?", "How many days does the carrier have?")
_TITLES = ("Lease", "Purchase of land", "Carriage by sea", "Storage")
_THREADS = 3
_ZERO_AT_IDLE = tuple(
    f"kvkeep_{what}"
    for what in (
        "pinned_caches",
        "running_loads",
        "running_queries",
        "waiting_queries",
        "running_builds",
    )
)
_CONTEXTS_MAX = 6
# A server lives for so many requests and a moment more, however fast the machine is.
_REQUESTS_MAX = 15
_MOMENT_SECONDS_MAX = 0.3
_POLL_SECONDS = 0.005
_LIFE_SECONDS_MAX = 20.0


@dataclass(slots=True)
class Users:
    """What the users of all starts together know. Guarded by ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    contexts: dict[str, str] = field(default_factory=dict)
    deleting: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_answers: int = 0

    def count_request(self) -> None:
        with self.lock:
            self.num_requests += 1

    def acknowledge(self, context_id: str, title: str) -> None:
        with self.lock:
            self.contexts[context_id] = title

    def any_context(self, chance: random.Random) -> str | None:
        with self.lock:
            living = sorted(set(self.contexts) - self.deleting)
        return chance.choice(living) if living else None

    def compare(self, title: str, question: str, token_ids: list[int]) -> None:
        with self.lock:
            self.num_answers += 1
            first = self.answers.setdefault((title, question), token_ids)
            if first != token_ids:
                self.findings.append(f"{title}, {question}: {token_ids} after {first}")


def soak_server(folder: Path, kills: int, seed: int, say: Callable[[str], None]) -> list[str]:
    """Kill a server so many times; return what is wrong afterwards."""
    folder.mkdir(parents=True)
    model = save_tiny_model("llama", folder / "model")
    chance, users = random.Random(seed), Users()
    server = Server(folder / "data", model=model, threads=1, **EAGER_SWEEPS)
    try:
        for count in range(1, kills + 1):
            server.start()
            _live_and_die(server, users, chance)
            told = f"{len(users.contexts)} contexts, {users.num_answers} equal answers"
            say(f"server killed {count} times: {told}, {len(users.findings)} findings")
        server.start()
        _finish(server, users)
        _judge(server, users)
    finally:
        server.close()
    return users.findings


def _live_and_die(server: Server, users: Users, chance: random.Random) -> None:
    dying = threading.Event()
    seeds = [chance.getrandbits(32) for _ in range(_THREADS)]
    threads = [
        threading.Thread(target=_use, args=(server.url, users, random.Random(seed), dying))
        for seed in seeds
    ]
    for thread in threads:
        thread.start()
    enough = users.num_requests + chance.randint(0, _REQUESTS_MAX)
    give_up_at = time.monotonic() + _LIFE_SECONDS_MAX
    while users.num_requests < enough and time.monotonic() < give_up_at:
        time.sleep(_POLL_SECONDS)
    time.sleep(chance.uniform(0, _MOMENT_SECONDS_MAX))
    # Requests that fail from here on are the kill's.
    dying.set()
    server.kill()
    for thread in threads:
        thread.join()


def _use(url: str, users: Users, chance: random.Random, dying: threading.Event) -> None:
    """Register, ask and delete until the server is gone."""
    with httpx2.Client(base_url=url, timeout=60) as http:
        while not dying.is_set():
            try:
                _use_once(http, users, chance)
                users.count_request()
            except httpx2.HTTPError as error:
                if not dying.wait(5):
                    with users.lock:
                        users.findings.append(f"a living server: {type(error).__name__}")


def _use_once(http: httpx2.Client, users: Users, chance: random.Random) -> None:
    context_id = users.any_context(chance)
    has_room = len(users.contexts) - len(users.deleting) < _CONTEXTS_MAX
    if context_id is None or (has_room and chance.random() < 0.5):
        title = chance.choice(_TITLES)
        response = http.post("/contexts", json={"document": contract(title, 25)})
        if _is_well(users, response, 200, 202):
            users.acknowledge(response.json()["id"], title)
    elif chance.random() < 0.15:
        with users.lock:
            users.deleting.add(context_id)
        if _is_well(users, http.delete(f"/contexts/{context_id}"), 204):
            with users.lock:
                users.deleted.add(context_id)
    else:
        _ask(http, users, context_id, chance.choice(QUESTIONS))


def _ask(http: httpx2.Client, users: Users, context_id: str, question: str) -> None:
    body = {"question": question, "return_token_ids": True, "max_tokens": 8, "wait": 20}
    response = http.post(f"/contexts/{context_id}/query", json=body)
    # Not ready in time, or deleted by another user.
    if _is_well(users, response, 200, 404, 409) and response.status_code == 200:
        users.compare(users.contexts[context_id], question, response.json()["token_ids"])


def _is_well(users: Users, response: httpx2.Response, *expected: int) -> bool:
    if response.status_code in expected:
        return True
    with users.lock:
        users.findings.append(f"{response.request.method}: {response.status_code} {response.text}")
    return False


def _finish(server: Server, users: Users) -> None:
    """Repeat the deletions that were cut short, and wait for what is being built."""
    for context_id in sorted(users.deleting - users.deleted):
        server.http.delete(f"/contexts/{context_id}").raise_for_status()
    listed = server.http.get("/contexts?limit=100").json()["data"]
    for context in listed:
        eventually(lambda id_=context["id"]: _status(server, id_) in ("ready", "failed"))


def _status(server: Server, context_id: str) -> str:
    return str(server.context(context_id)["status"])


def _judge(server: Server, users: Users) -> None:
    living = set(users.contexts) - users.deleting
    listed = {item["id"]: item for item in server.http.get("/contexts?limit=100").json()["data"]}
    users.findings += [f"{id_}: acknowledged, and lost" for id_ in sorted(living - set(listed))]
    users.findings += [
        f"{id_}: deleted, and there again" for id_ in sorted(users.deleting & set(listed))
    ]
    for context_id in sorted(living & set(listed)):
        if listed[context_id]["status"] != "ready":
            users.findings.append(f"{context_id}: {listed[context_id]['error']}")
            continue
        for question in QUESTIONS:
            answer = server.ask(context_id, question, max_tokens=8)
            users.compare(users.contexts[context_id], question, answer["token_ids"])
    wanted = len(
        {
            server.http.get(f"/contexts/{id_}/document").json()["document"]
            for id_, item in listed.items()
            if item["status"] == "ready"
        }
    )
    with suppress(AssertionError):
        eventually(lambda: not _left_over(server, wanted))
    users.findings += _left_over(server, wanted)


def _left_over(server: Server, wanted: int) -> list[str]:
    """Whatever an idle server should not have: held, leased, orphaned or half-written."""
    found = [line for line in server.http.get("/metrics").text.splitlines() if _is_held(line)]
    keys = server.valkey("KEYS *:lease:*").splitlines()
    found += [key for key in keys if key.startswith("kvkeep:")]
    files = (server.objects / name for name in files_below(server.objects))
    found += [str(path) for path in files if durable.is_temporary(path.name)]
    generations = server.generations()
    if len(generations) != wanted:
        found.append(f"for {wanted} documents there is {generations}")
    return [f"at idle: {what}" for what in found]


def _is_held(line: str) -> bool:
    """Whether this is a gauge that must be 0 when nothing runs, and is not."""
    name, _, value = line.partition(" ")
    return name in _ZERO_AT_IDLE and float(value) != 0
