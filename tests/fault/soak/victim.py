"""A process without torch that does everything that changes stores, until it is killed.

It checks what it is told, and notes what it must not be wrong about later.
"""

import asyncio
import os
import random
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvkeep_service.errors import ContextNotFound
from kvkeep_storage.documents import get_document
from kvkeep_storage.errors import Conflict, Gone, NotFound, StorageError, Unavailable
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import ContextRecord

from ...support.caches import RATIOS, assert_equal_rows
from .building import work
from .notes import Notes
from .storage_calls import Calls, Place
from .synthetic import NUM_TEXTS, TENANTS, rows_of, text_of

OPERATIONS = ("register", "build", "load", "delete", "sweep", "rebuild", "reindex")
# Others delete, build and sweep beside us; everything else than these is a finding.
_HARMLESS = (NotFound, ContextNotFound, Gone, Conflict, Unavailable)
_CONTEXTS_MAX = 10
_PAUSE_SECONDS = 0.01


class Victim:
    """One of several on the same stores; ``name`` also names its notes."""

    def __init__(self, calls: Calls, notes: Notes, name: str, seed: int) -> None:
        self._calls = calls
        self._notes = notes
        self._name = name
        self._random = random.Random(seed)

    async def run(self) -> None:
        operations: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "register": (4, self._register),
            "build": (6, self._build),
            "load": (6, self._load),
            "delete": (2, self._delete),
            "sweep": (2, self._sweep),
            "rebuild": (1, self._rebuild),
            "reindex": (1, self._reindex),
        }
        weights = [weight for weight, _ in operations.values()]
        while True:
            (operation,) = self._random.choices(tuple(operations), weights)
            try:
                await operations[operation][1]()
            except _HARMLESS as error:
                self._notes.write(f"{operation} met {error.code}")
            except StorageError as error:
                self._notes.write("wrong", detail=f"{operation}: {type(error).__name__}: {error}")
            except Exception:  # noqa: BLE001  # it must reach the verdict
                self._notes.write("wrong", detail=f"{operation}: {traceback.format_exc()}")

    async def _register(self) -> None:
        tenant = self._random.choice(TENANTS)
        page = await self._calls.stores.metadata.contexts(tenant, limit=_CONTEXTS_MAX)
        if page.has_more:
            await self._delete()
            return
        expires = self._random.randint(1, 2) if self._random.random() < 0.2 else None
        number, ratio = self._random.randrange(NUM_TEXTS), self._random.choice(RATIOS)
        with self._notes.doing("register"):
            self._notes.write("registering", tenant)
            record = await self._calls.register(tenant, number, ratio, expires)
        detail = "" if expires is None else "expiring"
        self._notes.write("registered", tenant, record.id, detail)
        if record.status == "ready":
            self._notes.write("ready", tenant, record.id)

    async def _build(self) -> None:
        job = await self._calls.stores.jobs.claim(self._name, 0)
        if job is None:
            await self._calls.stores.jobs.reconcile(self._calls.stores.metadata)
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        with self._notes.doing("build"):
            await work(self._calls, job)
        self._notes.write("built", job.tenant, job.context_id)

    async def _load(self) -> None:
        record = await self._any_context()
        if record is None or record.status != "ready":
            return
        self._notes.write("ready", record.tenant, record.id)
        ratio = self._random.choice(record.ratios_available)
        with self._notes.doing("load"):
            await check_load(self._calls, record, ratio)
        self._notes.write("loaded", record.tenant, record.id)

    async def _rebuild(self) -> None:
        record = await self._any_context()
        if record is None or record.status not in ("ready", "failed"):
            return
        with self._notes.doing("rebuild"):
            await self._calls.rebuild(record)
        self._notes.write("rebuilt", record.tenant, record.id)

    async def _delete(self) -> None:
        record = await self._any_context()
        if record is None:
            return
        with self._notes.doing("delete"):
            self._notes.write("deleting", record.tenant, record.id)
            await self._calls.remove(record.tenant, record.id)
            self._notes.write("deleted", record.tenant, record.id)

    async def _sweep(self) -> None:
        with self._notes.doing("sweep"):
            report = await self._calls.sweep()
        for what in ("expired", "orphan_generations", "temp_files", "evicted"):
            for _ in range(getattr(report, what)):
                self._notes.write(f"swept {what}")

    async def _reindex(self) -> None:
        with self._notes.doing("reindex"):
            report = await self._calls.reindex()
        self._notes.write("reindexed")
        for damaged in report.damaged:
            # Registrations and deletions that are under way look like this.
            if not damaged.endswith("document or mirror is missing"):
                self._notes.write("wrong", detail=f"reindex: {damaged}")

    async def _any_context(self) -> ContextRecord | None:
        tenant = self._random.choice(TENANTS)
        found = await self._calls.stores.metadata.contexts(tenant, limit=2 * _CONTEXTS_MAX)
        return self._random.choice(found.records) if found.records else None


async def check_load(calls: Calls, record: ContextRecord, ratio: float) -> None:
    """Load a ready context at a ratio; it must give the one right content, bit for bit.

    Raises: AssertionError, also when a context that is still ready cannot be loaded.
    """
    text = text_of(int(record.metadata["number"]))
    try:
        loaded = await calls.load(record.tenant, text, ratio)
    except NotFound as error:
        now = await calls.stores.metadata.context(record.tenant, record.id)
        if now is not None and now.status == "ready":
            assert calls.cap_bytes is not None, "a ready context has no cache"
            await calls.recover(record, error)
        raise
    assert_equal_rows(loaded.rows, rows_of(record.tenant, text, ratio))
    try:
        key = DocumentKey(record.tenant, record.id)
        body = await get_document(calls.stores.objects, key)
    except NotFound:
        # Its deletion has begun.
        return
    assert body.text == text, "another document stands in its place"


def main(place: Place, folder: Path, name: str, seed: int) -> None:
    """The whole life of a victim: it never returns."""
    notes = Notes(folder, name)
    # Whatever the product logs, for who looks into a finding.
    log = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    if "torch" in sys.modules:
        notes.write("wrong", detail="the victim has loaded torch")

    async def live() -> None:
        while True:
            try:
                async with Calls.open(place) as calls:
                    await Victim(calls, notes, name, seed).run()
            except Unavailable as error:
                notes.write(f"start met {error.code}")

    asyncio.run(live())
