"""Run as ``python -m tests.fault.soak``: kill, finish, judge; exit 1 when anything is wrong."""

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from redis.asyncio import Redis

from kvkeep_storage.embedded import EmbeddedStore

from .controller import Controller, prepare
from .notes import Told
from .storage_calls import Calls
from .verdict import Verdict, empty, finish, judge

# Seldom done, and cut short most of the time: once per so many kills.
_KILLS_PER_ROUND = 50
_VICTIMS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=280, help="of the torch-free process")
    parser.add_argument("--server-kills", type=int, default=20, help="of a real server")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    chosen = parser.parse_args()
    say(f"seed {chosen.seed}")
    folder = Path(tempfile.mkdtemp(prefix="kvkeep-soak-"))
    findings: list[str] = []
    if chosen.kills:
        findings += soak_storage(folder / "storage", chosen.kills, chosen.seed)
    if chosen.server_kills:
        from .server_kills import soak_server  # it loads torch

        findings += soak_server(folder / "server", chosen.server_kills, chosen.seed, say)
    for finding in findings:
        say(f"WRONG {finding}")
    if findings:
        say(f"{len(findings)} findings with --seed {chosen.seed}; everything is left in {folder}")
        return 1
    shutil.rmtree(folder)
    say(f"survived {chosen.kills} + {chosen.server_kills} kills, seed {chosen.seed}")
    return 0


def soak_storage(folder: Path, kills: int, seed: int) -> list[str]:
    """Kill the torch-free process; return what is wrong afterwards."""
    notes, root = folder / "notes", folder / "objects"
    notes.mkdir(parents=True)
    store = EmbeddedStore(folder)
    store.start()
    try:
        prepare()
        controller = Controller(store.redis_url, root, notes, random.Random(seed), _VICTIMS)
        done = 0
        while done < kills:
            started = time.monotonic()
            done = min(kills, done + _KILLS_PER_ROUND)
            controller.run(done)
            verdict, told = asyncio.run(_judge(store.redis_url, root, notes))
            _tell(verdict, told, controller, time.monotonic() - started)
            if verdict.findings:
                return verdict.findings
        verdict = asyncio.run(_robbed(store.redis_url, root, notes))
        say(f"robbed of all records and reindexed: {verdict.ready} contexts ready")
        missed = [f"no kill has interrupted: {what}" for what in controller.missed]
        return verdict.findings + missed
    finally:
        store.stop()


async def _judge(redis_url: str, root: Path, notes: Path) -> tuple[Verdict, Told]:
    told = Told.read(notes)
    async with Calls.open(redis_url, root) as calls:
        await finish(calls, told)
        return await judge(calls, told), told


async def _robbed(redis_url: str, root: Path, notes: Path) -> Verdict:
    """Lose every record; what was acknowledged must come back, and nothing deleted."""
    told = Told.read(notes)
    client = Redis.from_url(redis_url, protocol=2)
    async with Calls.open(redis_url, root) as calls:
        await client.flushall()
        await client.aclose()
        await calls.reindex()
        await finish(calls, told)
        verdict = await judge(calls, told)
        verdict.findings += [f"left of nothing: {name}" for name in await empty(calls)]
        return verdict


def _tell(verdict: Verdict, told: Told, controller: Controller, seconds: float) -> None:
    say(f"{controller.hits.total()} kills: {controller}")
    say("told so far: " + ", ".join(f"{what} {n}" for what, n in sorted(told.counts.items())))
    say(
        f"after {seconds:.0f} s: {verdict.ready} contexts ready, {verdict.failed} given up, "
        f"{verdict.checked_loads} loads right bit for bit, {len(verdict.findings)} findings"
    )


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
