"""Which caches are in memory: pinned while used, shared, brought once, given up by budget.

Belongs to the event loop: nothing here is called from the engine's thread.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvkeep_service.bringing import Bring, Load, Loads
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.ports import CacheCounts, CacheSource, MissReason
from kvkeep_service.reservations import UNBOUNDED, Reservations
from kvkeep_service.shelf import CacheKey, Entry, OnEvicted, Shelf
from kvkeep_storage.errors import NotFound


@dataclass(frozen=True, slots=True)
class Pinned:
    """A resident cache in use at a ratio, where it came from, and how long that took in seconds."""

    context: ResidentContext
    ratio: float
    source: CacheSource
    load_seconds: float


class Residency:
    """A budgeted table of caches in memory; the cheapest to bring back per byte goes first.

    A cache in use is never given up, so the budget is exceeded while queries need more. A query
    reads no more than its ratio: of a cache that is in memory at lower ratios only, a higher one
    is loaded anew, and queries that run go on with what they have.
    """

    def __init__(
        self,
        bring: Bring,
        *,
        budget_bytes: int,
        memory_bytes: int = UNBOUNDED,
        grows_in_place: bool = True,
        on_failure: Callable[[CacheKey, Exception], None],
        on_evicted: OnEvicted | None = None,
    ) -> None:
        """``bring`` loads a cache, verified, or raises.

        ``memory_bytes`` bounds what caches, builds and tails have together.
        ``grows_in_place``: whether its first bands can be used while it brings the rest.
        ``on_failure`` hears of what went wrong with a load after somebody got a part of it, or
        with one that nobody waited for; ``on_evicted`` of what the budget had no room for.
        """
        self._shelf = Shelf(budget_bytes, on_evicted)
        self._loads = Loads(bring, self._shelf, on_failure)
        self.reservations = Reservations(memory_bytes, self._used_bytes, self.keep_to_budget)
        self._grows_in_place = grows_in_place
        self._hits = 0
        self._misses: dict[MissReason, int] = dict.fromkeys(
            ("absent", "ratio", "evicted", "dropped", "corrupt"), 0
        )

    @asynccontextmanager
    async def pinned(
        self, key: CacheKey, ratio: float, min_ratio: float | None = None
    ) -> AsyncIterator[Pinned]:
        """Hold a cache at ``ratio`` for the length of a ``with`` block.

        With ``min_ratio`` a lower ratio will do, as far down as that: the highest that is in
        memory, else ``min_ratio`` as soon as it is there. The rest is brought in the background.
        Raises: what ``bring`` raises; every waiter of one load gets the same error. NotFound when
            the loaded cache is cut at none of these ratios.
        """
        started = time.perf_counter()
        lowest = ratio if min_ratio is None else min_ratio
        entry = self._shelf.find(key)
        if entry is not None and entry.context.highest_ratio(lowest, ratio) is not None:
            self._hits += 1
            source: CacheSource = "resident"
            self._shelf.pin(entry)
        else:
            self._misses["ratio" if entry else self._shelf.why_absent(key)] += 1
            entry = await self._fetch(key, lowest, ratio)
            source = entry.source
        try:
            context = entry.context
            found = context.highest_ratio(lowest, ratio)
            if found is None:
                raise NotFound("cache", f"{key.cache_id} at ratio {ratio}")
            if found < ratio and self._loads.bringing(key, ratio) is None:
                self._loads.start_aside(key, ratio)
            yield Pinned(context, found, source, time.perf_counter() - started)
        finally:
            self._shelf.unpin(entry)
            self._loads.cancel_unwanted()
            self.keep_to_budget()
            self.reservations.freed()

    def prefetch(self, key: CacheKey, ratio: float) -> bool:
        """Begin to bring a cache that nobody waits for; False when too many are brought so.

        It is kept only where it displaces nothing in use or dearer than itself. Trouble with it
        is told to nobody but ``on_failure``.
        """
        entry = self._shelf.find(key)
        if entry is not None and ratio in entry.context.ratios:
            self._shelf.touch(entry)
            return True
        load = self._loads.bringing(key, ratio)
        if load is None:
            return self._loads.start_aside(key, ratio)
        # Whoever began it may go away before it ends.
        load.is_kept = True
        return True

    def adopt(self, key: CacheKey, context: ResidentContext, *, build_seconds: float = 0.0) -> None:
        """Keep a cache that was just built, as if it had been loaded."""
        self._shelf.put(Entry(key, context, "resident"), build_seconds)
        self.keep_to_budget()

    def drop(self, key: CacheKey) -> None:
        """Forget a cache now; queries that hold it, or wait for it, have it until they end."""
        self._loads.drop(key)
        self._shelf.drop(key)

    def keep_to_budget(self) -> None:
        """Give up caches that are idle and over the budget, or in the way of a reservation."""
        self._shelf.limit(self.reservations.left_for_caches)
        self._loads.keep_to_budget()

    def give_up_idle(self) -> None:
        """Forget every cache that nobody uses: memory ran out."""
        self._shelf.limit(0)
        self._loads.keep_to_budget()
        self._shelf.limit(self.reservations.left_for_caches)

    async def close(self) -> None:
        """End what is brought in the background, and every other load."""
        await self._loads.close()

    @property
    def size_bytes(self) -> int:
        """Bytes of K and V held or being filled, those still used after ``drop`` included."""
        return self._shelf.size_bytes + self._loads.size_bytes

    @property
    def num_caches(self) -> int:
        """Caches a query would find in memory."""
        return self._shelf.num_entries

    @property
    def keys(self) -> list[CacheKey]:
        """The caches a query would find in memory."""
        return self._shelf.keys

    @property
    def num_pinned(self) -> int:
        """Caches in use."""
        return self._shelf.num_pinned

    @property
    def num_loads(self) -> int:
        """Loads that are running."""
        return self._loads.num_running

    def counts(self) -> CacheCounts:
        """What became of looking for caches, since the start."""
        return CacheCounts(
            hits=self._hits,
            misses=dict(self._misses),
            evictions=self._shelf.num_evicted,
            loads={source: count.snapshot() for source, count in self._loads.counts.items()},
            failures=dict(self._loads.failures),
        )

    def _used_bytes(self) -> int:
        return self._shelf.used_bytes + self._loads.size_bytes

    async def _fetch(self, key: CacheKey, lowest: float, ratio: float) -> Entry:
        """Wait for a load that brings one of these ratios. Returns an entry that is pinned."""
        load = self._suitable(key, lowest, ratio) or self._begin(key, lowest, ratio)
        return await self._loads.pinned_entry(load, lowest, ratio)

    def _suitable(self, key: CacheKey, lowest: float, ratio: float) -> Load | None:
        """A running load to share: it brings the ratio, or at first one from the lowest on."""
        for load in self._loads.of(key):
            if lowest < ratio:
                # Not one that brings all of it at once: that would not start from less.
                if lowest <= load.first_ratio < ratio:
                    return load
            elif load.ratio >= ratio:
                return load
        return None

    def _begin(self, key: CacheKey, lowest: float, ratio: float) -> Load:
        if lowest == ratio:
            return self._loads.start(key, ratio)
        is_coming = self._loads.bringing(key, ratio) is not None
        if is_coming or not self._grows_in_place or not self._loads.has_room_aside:
            # Less is there sooner; the rest comes with another load, or at another query.
            return self._loads.start(key, lowest)
        return self._loads.start(key, ratio, first_ratio=lowest)
