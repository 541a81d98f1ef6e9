"""Which caches are in memory: pinned while used, shared, loaded once, evicted by budget.

Belongs to the event loop: nothing here is called from the engine's thread.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.ports import CacheSource
from kvkeep_storage.errors import NotFound


class CacheKey(NamedTuple):
    """A cache of a tenant."""

    tenant: str
    cache_id: str


@dataclass(slots=True, eq=False)
class _Entry:
    context: ResidentContext
    pins: int = 0


@dataclass(slots=True, eq=False)
class _Load:
    """One load and its waiters; the first of them to go on makes the entry for all."""

    task: asyncio.Task[ResidentContext]
    waiters: int = 0
    entry: _Entry | None = None
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Pinned:
    """A resident cache in use, where it came from, and how long that took in seconds."""

    context: ResidentContext
    source: CacheSource
    load_seconds: float


class Residency:
    """A budgeted table of resident caches, least recently used out first.

    A cache in use is never evicted, so the budget is exceeded while queries need more.
    """

    def __init__(
        self,
        load: Callable[[CacheKey], Coroutine[Any, Any, ResidentContext]],
        *,
        budget_bytes: int,
    ) -> None:
        """``load`` brings a cache from the store, verified, or raises."""
        self._load = load
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()
        self._loads: dict[CacheKey, _Load] = {}
        self._detached: set[_Entry] = set()

    @asynccontextmanager
    async def pinned(self, key: CacheKey, ratio: float) -> AsyncIterator[Pinned]:
        """Hold a cache that is cut at ``ratio`` for the length of a ``with`` block.

        Raises: what ``load`` raises; every waiter of one load gets the same error. NotFound when
            even the loaded cache is not cut at ``ratio``.
        """
        started = time.perf_counter()
        source: CacheSource = "resident"
        entry = self._entries.get(key)
        if entry is None or ratio not in entry.context.ratios:
            entry, source = await self._fetch(key), "store"
        entry.pins += 1
        if self._entries.get(key) is entry:
            self._entries.move_to_end(key)
        else:
            self._detached.add(entry)
        try:
            if ratio not in entry.context.ratios:
                raise NotFound("cache", f"{key.cache_id} at ratio {ratio}")
            yield Pinned(entry.context, source, time.perf_counter() - started)
        finally:
            entry.pins -= 1
            if not entry.pins:
                self._detached.discard(entry)
            self._evict()

    def adopt(self, key: CacheKey, context: ResidentContext) -> None:
        """Keep a cache that was just built, as if it had been loaded."""
        self._replace(key, context)
        self._evict()

    def drop(self, key: CacheKey) -> None:
        """Forget a cache now; queries that hold it, or wait for it, have it until they end."""
        load = self._loads.pop(key, None)
        if load is not None:
            load.is_dropped = True
        self._remove(key)

    @property
    def size_bytes(self) -> int:
        """Bytes of K and V held, those still used after ``drop`` included."""
        held = [*self._entries.values(), *self._detached]
        return sum(entry.context.size_bytes for entry in held)

    @property
    def num_caches(self) -> int:
        """Caches a query would find in memory."""
        return len(self._entries)

    @property
    def num_pinned(self) -> int:
        """Caches in use."""
        return len(self._detached) + sum(1 for e in self._entries.values() if e.pins)

    async def _fetch(self, key: CacheKey) -> _Entry:
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _Load(asyncio.create_task(self._load(key)))
        load.waiters += 1
        try:
            # Shielded: one waiter that goes away must not take the load from the others.
            context = await asyncio.shield(load.task)
        finally:
            load.waiters -= 1
            if not load.waiters:
                # Nobody is left to take the result, nor to be told of an error.
                load.task.cancel()
            if self._loads.get(key) is load and (load.task.done() or not load.waiters):
                del self._loads[key]
        if load.entry is None:
            # Dropped meanwhile: whoever waited may use it, but nobody after them.
            load.entry = _Entry(context) if load.is_dropped else self._place(key, context)
        return load.entry

    def _place(self, key: CacheKey, context: ResidentContext) -> _Entry:
        """Keep a loaded cache, unless a build has brought as much of it in the meantime."""
        present = self._entries.get(key)
        if present is not None and set(present.context.ratios) >= set(context.ratios):
            return present
        return self._replace(key, context)

    def _replace(self, key: CacheKey, context: ResidentContext) -> _Entry:
        self._remove(key)
        entry = _Entry(context)
        self._entries[key] = entry
        return entry

    def _remove(self, key: CacheKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.pins:
            self._detached.add(entry)

    def _evict(self) -> None:
        for key, entry in list(self._entries.items()):
            if self.size_bytes <= self._budget_bytes:
                return
            if not entry.pins:
                del self._entries[key]
