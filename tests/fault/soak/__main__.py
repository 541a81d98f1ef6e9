"""Run as ``python -m tests.fault.soak``: kill, finish, judge; exit 1 when anything is wrong."""

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvkeep_storage.embedded import EmbeddedStore

from ...support.s3_servers import ACCESS_KEY, SECRET_KEY, Seaweed
from .controller import Controller, prepare
from .notes import Told
from .storage_calls import Calls, Place
from .verdict import Verdict, empty, finish, judge

# Seldom done, and cut short most of the time: once per so many kills.
_KILLS_PER_ROUND = 50
_VICTIMS = 3
# Most kills would miss what lies between two writes if those followed each other at once.
_HESITATION = "delay=0.25,delay_seconds=0.03"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=280, help="of the torch-free process")
    parser.add_argument("--server-kills", type=int, default=20, help="of a real server")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--s3", action="store_true", help="SeaweedFS and a disk tier, no directory")
    parser.add_argument(
        "--faults", default=_HESITATION, help="of the victims' store, as KVKEEP_FAULTS has them"
    )
    parser.add_argument("--cap-bytes", type=int, help="of caches that sweeps leave")
    chosen = parser.parse_args()
    say(f"seed {chosen.seed}")
    folder = Path(tempfile.mkdtemp(prefix="kvkeep-soak-"))
    findings: list[str] = []
    if chosen.kills:
        with _place(folder / "storage", is_remote=chosen.s3) as place:
            place = replace(place, cap_bytes=chosen.cap_bytes)
            findings += soak_storage(place, folder, chosen.kills, chosen.seed, chosen.faults)
    if chosen.server_kills:
        # It loads torch, which the victims must never have seen.
        from .server_kills import soak_server

        findings += soak_server(folder / "server", chosen.server_kills, chosen.seed, say)
    for finding in findings:
        say(f"WRONG {finding}")
    if findings:
        say(f"{len(findings)} findings with --seed {chosen.seed}; everything is left in {folder}")
        return 1
    shutil.rmtree(folder)
    say(f"survived {chosen.kills} + {chosen.server_kills} kills, seed {chosen.seed}")
    return 0


@contextmanager
def _place(folder: Path, *, is_remote: bool) -> Iterator[Place]:
    """A Valkey that no kill meets, and a directory or a bucket of objects."""
    store = EmbeddedStore(folder)
    store.start()
    try:
        if not is_remote:
            yield Place.local(store.redis_url, folder / "objects")
            return
        seaweed = Seaweed(folder / "seaweed")
        os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        try:
            seaweed.start()
            yield Place(store.redis_url, seaweed.server.url("soak"), disk=folder / "disk-cache")
        finally:
            seaweed.kill()
    finally:
        store.stop()


def soak_storage(place: Place, folder: Path, kills: int, seed: int, faults: str) -> list[str]:
    """Kill the torch-free process; return what is wrong afterwards."""
    notes = folder / "notes"
    notes.mkdir()
    prepare()
    suffering = replace(place, faults=faults)
    controller = Controller(suffering, notes, random.Random(seed), _VICTIMS)
    done = 0
    while done < kills:
        started = time.monotonic()
        done = min(kills, done + _KILLS_PER_ROUND)
        controller.run(done)
        verdict, told = asyncio.run(_judge(place, notes))
        _tell(verdict, told, controller, time.monotonic() - started)
        if verdict.findings:
            return verdict.findings
    verdict = asyncio.run(_robbed(place, notes))
    say(f"robbed of all records and reindexed: {verdict.ready} contexts ready")
    missed = [f"no kill has interrupted: {what}" for what in controller.missed]
    return verdict.findings + missed


async def _judge(place: Place, notes: Path) -> tuple[Verdict, Told]:
    told = Told.read(notes)
    async with Calls.open(place) as calls:
        await finish(calls, told)
        return await judge(calls, told), told


async def _robbed(place: Place, notes: Path) -> Verdict:
    """Lose every record; what was acknowledged must come back, and nothing deleted."""
    told = Told.read(notes)
    async with Calls.open(place) as calls:
        await calls.stores.metadata.link.command("FLUSHALL")
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
