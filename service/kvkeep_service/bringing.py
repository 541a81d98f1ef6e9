"""Loads that are running: each shared by all who wait for it, given up when nobody wants it.

Belongs to the event loop, as everything of residency does.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.errors import WorkerUnavailable
from kvkeep_service.ports import CacheSource, LoadCount
from kvkeep_service.shelf import CacheKey, Entry, Shelf
from kvkeep_storage.errors import Corrupt

# Loads that nobody waits for share the way to the store with those that somebody does.
ASIDE_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class Brought:
    """A whole cache, verified; where its bytes came from, and how many were read."""

    context: ResidentContext
    source: CacheSource
    read_bytes: int


class Receiver(Protocol):
    """Told by a load how far it is, on the event loop and in this order."""

    def room(self, size_bytes: int) -> None:
        """Buffers of so many bytes are about to be filled."""
        ...

    def usable(self, context: ResidentContext, source: CacheSource) -> None:
        """The first bands can be asked, though layers of them may still be arriving."""
        ...

    def first(self) -> None:
        """The first bands are verified whole; the rest follows in the same buffers."""
        ...


class Bring(Protocol):
    """Loads a cache at exactly a ratio, the bands up to ``first_ratio`` before the others."""

    def __call__(
        self, key: CacheKey, ratio: float, first_ratio: float, receiver: Receiver
    ) -> Coroutine[Any, Any, Brought]:
        """Bring it, verified, or raise; what the receiver was told stays valid."""
        ...


@dataclass(slots=True, eq=False)
class Load:
    """One running load. ``is_kept``: it goes on though nobody waits for it."""

    key: CacheKey
    ratio: float
    first_ratio: float
    is_aside: bool
    is_kept: bool
    started_at: float = field(default_factory=time.perf_counter)
    task: asyncio.Task[Brought] | None = None
    usable: asyncio.Future[None] = field(default_factory=asyncio.Future)
    whole: asyncio.Future[None] = field(default_factory=asyncio.Future)
    waiters: int = 0
    entry: Entry | None = None
    size_bytes: int = 0
    has_first: bool = False
    is_dropped: bool = False
    is_given_up: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether anybody needs it to go on."""
        uses_first = self.entry is not None and self.entry.pins > 0 and not self.has_first
        return self.waiters > 0 or self.is_kept or uses_first


@dataclass(slots=True)
class _Count:
    loads: int = 0
    seconds: float = 0.0
    read_bytes: int = 0

    def snapshot(self) -> LoadCount:
        return LoadCount(self.loads, self.seconds, self.read_bytes)


class Loads:
    """Starts, shares and ends loads, and puts what they bring on the shelf."""

    def __init__(
        self, bring: Bring, shelf: Shelf, on_failure: Callable[[CacheKey, Exception], None]
    ) -> None:
        """As ``Residency``."""
        self._bring = bring
        self._shelf = shelf
        self._on_failure = on_failure
        self._running: set[Load] = set()
        # Those that others may join; dropped and given up ones are no longer here.
        self._by_key: dict[CacheKey, list[Load]] = {}
        self.failures: Counter[str] = Counter()
        self.counts: dict[CacheSource, _Count] = {
            "host": _Count(),
            "disk": _Count(),
            "store": _Count(),
        }

    @property
    def num_running(self) -> int:
        """Loads that have not ended."""
        return len(self._running)

    @property
    def has_room_aside(self) -> bool:
        """Whether one more load may run that nobody waits for."""
        return sum(1 for load in self._running if load.is_aside) < ASIDE_MAX

    @property
    def size_bytes(self) -> int:
        """Bytes that are being filled and that the shelf does not know of."""
        return sum(
            load.size_bytes
            for load in self._running
            if load.entry is None or not self._shelf.holds(load.entry)
        )

    def of(self, key: CacheKey) -> Iterator[Load]:
        """Loads of a cache that can be joined."""
        return iter(self._by_key.get(key, ()))

    def bringing(self, key: CacheKey, ratio: float) -> Load | None:
        """A load that brings a cache at a ratio, or at more."""
        return next((load for load in self.of(key) if load.ratio >= ratio), None)

    def start(self, key: CacheKey, ratio: float, *, first_ratio: float | None = None) -> Load:
        """Begin a load that somebody is about to wait for; its rest may outlast them."""
        first = ratio if first_ratio is None else first_ratio
        return self._start(Load(key, ratio, first, is_aside=first < ratio, is_kept=False))

    def start_aside(self, key: CacheKey, ratio: float) -> bool:
        """Begin a load that nobody waits for; False when too many are running."""
        if not self.has_room_aside:
            return False
        self._start(Load(key, ratio, ratio, is_aside=True, is_kept=True))
        return True

    async def pinned_entry(self, load: Load, lowest: float, ratio: float) -> Entry:
        """Wait until a load has brought one of these ratios; the entry is pinned by then.

        Raises: what ended the load.
        """
        is_first_enough = lowest <= load.first_ratio
        load.waiters += 1
        try:
            # Shielded: one waiter that goes away must not take the load from the others.
            await asyncio.shield(load.usable if is_first_enough else load.whole)
            assert load.entry is not None
            self._shelf.pin(load.entry)
            return load.entry
        finally:
            load.waiters -= 1
            self.cancel_unwanted()

    def cancel_unwanted(self) -> None:
        """End loads that nobody waits for, nor needs in the background."""
        for load in self._running:
            if not load.is_wanted:
                self._cancel(load)

    def keep_to_budget(self) -> None:
        """Give up what is over the budget; then what is only brought in the background."""
        self._shelf.evict(self.size_bytes)
        if self._shelf.size_bytes + self.size_bytes > self._shelf.budget_bytes:
            for load in self._running:
                is_used = load.entry is not None and load.entry.pins > 0
                load.is_kept = load.is_kept and is_used
            self.cancel_unwanted()

    def drop(self, key: CacheKey) -> None:
        """Keep nothing that is being loaded of a cache; those who wait for it get it once."""
        for load in self._by_key.pop(key, []):
            load.is_dropped = True
            load.is_kept = False
        self.cancel_unwanted()

    async def close(self) -> None:
        """End all loads, and return when they have ended."""
        tasks = [load.task for load in self._running if load.task is not None]
        for load in self._running:
            self._cancel(load)
        await asyncio.gather(*tasks, return_exceptions=True)

    def has_room_for(self, load: Load) -> bool:
        """Whether what a load brings would be kept, were it used by nobody."""
        other_bytes = self.size_bytes - load.size_bytes
        seconds = self._seconds_for(load.size_bytes)
        return self._shelf.would_keep(load.key, load.size_bytes, seconds, other_bytes=other_bytes)

    def place_first(self, load: Load) -> None:
        """Let others find what a load has brought so far. Modifies: the shelf."""
        load.has_first = True
        self._placed(load)

    def _start(self, load: Load) -> Load:
        self._running.add(load)
        self._by_key.setdefault(load.key, []).append(load)
        work = self._bring(load.key, load.ratio, load.first_ratio, _Arrivals(self, load))
        load.task = asyncio.create_task(work)
        load.task.add_done_callback(lambda task: self._ended(load, task))
        return load

    def _cancel(self, load: Load) -> None:
        if load.is_given_up:
            # Once only: it is giving its lease back, and must not be disturbed.
            return
        load.is_given_up = True
        # Nobody may join it from now on, though it ends a little later.
        self._unlist(load)
        # What it was about to fill is free again in a moment: nothing has to go for it.
        load.size_bytes = 0
        assert load.task is not None
        load.task.cancel()

    def _ended(self, load: Load, task: "asyncio.Task[Brought]") -> None:
        self._unlist(load)
        self._running.discard(load)
        if task.cancelled():
            self._failed(load, None)
        elif (error := task.exception()) is not None:
            self._failed(load, error)
        else:
            self._completed(load, task.result())
        if not load.waiters:
            # Otherwise they are about to pin it, and keep to the budget afterwards.
            self.keep_to_budget()

    def _completed(self, load: Load, brought: Brought) -> None:
        seconds = time.perf_counter() - load.started_at
        count = self.counts[brought.source]
        count.loads += 1
        count.seconds += seconds
        count.read_bytes += brought.read_bytes
        if load.entry is None:
            load.entry = Entry(load.key, brought.context, brought.source)
        else:
            # Whoever holds it has what it had; the next ones have all of it.
            load.entry.context = brought.context
            self._shelf.stop_growing(load.entry)
        load.entry = self._placed(load)
        _settle(load.usable, None)
        _settle(load.whole, None)

    def _failed(self, load: Load, error: BaseException | None) -> None:
        """Leave no trace of it, and tell those who wait."""
        used = load.entry is not None and load.entry.pins > 0
        is_heard = not load.has_first and (load.waiters > 0 or used)
        if load.entry is not None:
            self._shelf.discard(load.entry)
            self._shelf.stop_growing(load.entry)
        if isinstance(error, Corrupt):
            self._shelf.explain(load.key, "corrupt")
        if error is not None:
            self.failures[getattr(error, "code", "internal")] += 1
        told = error or WorkerUnavailable("the load was given up")
        _settle(load.usable, told)
        _settle(load.whole, told)
        if isinstance(error, Exception) and not is_heard:
            self._on_failure(load.key, error)

    def _unlist(self, load: Load) -> None:
        listed = self._by_key.get(load.key, [])
        if load in listed:
            listed.remove(load)
        if not listed:
            self._by_key.pop(load.key, None)

    def _placed(self, load: Load) -> Entry:
        assert load.entry is not None
        if load.is_dropped:
            return load.entry
        return self._shelf.put(load.entry, time.perf_counter() - load.started_at)

    def _seconds_for(self, size_bytes: int) -> float:
        """What a load of that size may take, by those that have ended."""
        seconds = sum(count.seconds for count in self.counts.values())
        read_bytes = sum(count.read_bytes for count in self.counts.values())
        return size_bytes * seconds / read_bytes if read_bytes else 0.0


class _Arrivals:
    """Implements ``Receiver`` for one load."""

    def __init__(self, loads: Loads, load: Load) -> None:
        self._loads = loads
        self._load = load

    def room(self, size_bytes: int) -> None:
        """As ``Receiver.room``: make room, or do without what nobody waits for."""
        load = self._load
        load.size_bytes = size_bytes
        if load.is_kept and not load.waiters and not self._loads.has_room_for(load):
            load.is_kept = False
            self._loads.cancel_unwanted()
        self._loads.keep_to_budget()

    def usable(self, context: ResidentContext, source: CacheSource) -> None:
        """As ``Receiver.usable``."""
        load = self._load
        load.entry = Entry(load.key, context, source, is_growing=True)
        _settle(load.usable, None)

    def first(self) -> None:
        """As ``Receiver.first``."""
        load = self._load
        # What is verified by now is worth to be kept, however soon its question ends.
        load.is_kept = not load.is_dropped
        if load.first_ratio < load.ratio:
            self._loads.place_first(load)


def _settle(future: "asyncio.Future[None]", error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
        return
    future.set_exception(error)
    # Perhaps nobody waits: an error that was never looked at would be logged as forgotten.
    future.exception()
