"""The caches that are in memory, and which of them goes when the budget is full.

Belongs to the event loop, as everything of residency does.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.ports import CacheSource, MissReason
from kvkeep_storage.lru import CostAwareLru

# Keys of caches that have gone, with the reason: enough to explain misses, and no more.
_REMEMBERED_MAX: Final = 4096


class CacheKey(NamedTuple):
    """A cache of a tenant."""

    tenant: str
    cache_id: str


# A cache that goes, and the seconds it took to bring or build it.
OnEvicted: TypeAlias = Callable[[CacheKey, ResidentContext, float], None]


@dataclass(slots=True, eq=False)
class Entry:
    """A cache in memory, or the first bands of one. ``source``: where it was brought from.

    ``is_growing`` while a load still fills its buffers, which giving it up would not free.
    """

    key: CacheKey
    context: ResidentContext
    source: CacheSource
    pins: int = 0
    is_growing: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of its buffers."""
        return self.context.size_bytes


class Shelf:
    """Entries by key, in a byte budget, and those that only their queries still hold."""

    def __init__(self, budget_bytes: int, on_evicted: OnEvicted | None = None) -> None:
        """Start empty. ``on_evicted`` is told what the budget had no room for."""
        self._on_evicted = on_evicted
        self._entries: dict[CacheKey, Entry] = {}
        self._most_bytes = budget_bytes
        self._lru: CostAwareLru[Entry | CacheKey] = CostAwareLru(budget_bytes)
        self._detached: set[Entry] = set()
        self._gone: OrderedDict[CacheKey, MissReason] = OrderedDict()
        self.num_evicted = 0

    @property
    def budget_bytes(self) -> int:
        """What may be held without being in use, now."""
        return self._lru.budget_bytes

    def limit(self, left_bytes: int) -> None:
        """Others have left this much for caches: the budget is no more, until the next call."""
        self._lru.budget_bytes = min(self._most_bytes, left_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of entries that cannot be given up now."""
        held = (*self._entries.values(), *self._detached)
        return sum(entry.size_bytes for entry in held if entry.pins or entry.is_growing)

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries, those that only queries still hold included."""
        return self._lru.size_bytes + sum(entry.size_bytes for entry in self._detached)

    @property
    def num_entries(self) -> int:
        """Caches a query would find."""
        return len(self._entries)

    @property
    def num_pinned(self) -> int:
        """Caches in use."""
        return sum(1 for entry in (*self._entries.values(), *self._detached) if entry.pins)

    @property
    def keys(self) -> list[CacheKey]:
        """The caches a query would find."""
        return list(self._entries)

    def find(self, key: CacheKey) -> Entry | None:
        """What is there of a cache."""
        return self._entries.get(key)

    def holds(self, entry: Entry) -> bool:
        """Whether an entry is in the books: found by its key, or held by a query."""
        return entry in self._detached or self._entries.get(entry.key) is entry

    def why_absent(self, key: CacheKey) -> MissReason:
        """Why a cache is not there, as far as that is remembered."""
        return self._gone.get(key, "absent")

    def put(self, entry: Entry, cost_seconds: float) -> Entry:
        """Enter a cache, or what it has become, unless as much of it is there already.

        ``cost_seconds``: what it took to bring or build it. Returns what is found from now on.
        An older entry of the same cache stays with the queries that hold it.
        """
        present = self._entries.get(entry.key)
        if present is not None and present is not entry:
            if set(present.context.ratios) >= set(entry.context.ratios):
                return present
            self._remove(present)
        self._entries[entry.key] = entry
        self._detached.discard(entry)
        self._gone.pop(entry.key, None)
        # Entered anew, so that pins are counted once.
        self._lru.remove(entry)
        self._lru.put(entry, entry.size_bytes, cost_seconds)
        if entry.pins or entry.is_growing:
            self._lru.pin(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """Count a use."""
        if entry in self._lru:
            self._lru.touch(entry)

    def pin(self, entry: Entry) -> None:
        """Keep an entry until ``unpin``; it counts as a use."""
        was_held = entry.pins > 0 or entry.is_growing
        entry.pins += 1
        if entry not in self._lru:
            self._detached.add(entry)
            return
        self._lru.touch(entry)
        if not was_held:
            self._lru.pin(entry)

    def unpin(self, entry: Entry) -> None:
        """Take one pin back."""
        entry.pins -= 1
        self._let_go(entry)

    def stop_growing(self, entry: Entry) -> None:
        """Its load has ended."""
        if entry.is_growing:
            entry.is_growing = False
            self._let_go(entry)

    def drop(self, key: CacheKey) -> None:
        """Forget a cache; queries that hold it have it until they end."""
        self.explain(key, "dropped")
        entry = self._entries.get(key)
        if entry is not None:
            self._remove(entry)

    def discard(self, entry: Entry) -> None:
        """Forget this very entry, if it is still found."""
        if self._entries.get(entry.key) is entry:
            self._remove(entry)

    def explain(self, key: CacheKey, reason: MissReason) -> None:
        """Say why a cache is not there, or will not be."""
        self._gone[key] = reason
        self._gone.move_to_end(key)
        if len(self._gone) > _REMEMBERED_MAX:
            self._gone.popitem(last=False)

    def evict(self, needed_bytes: int = 0) -> None:
        """Give up what the budget has no room for beside ``needed_bytes`` more."""
        needed_bytes += sum(entry.size_bytes for entry in self._detached)
        for entry in self._lru.victims(needed_bytes):
            assert isinstance(entry, Entry), "a guess is never left in the books"
            if self._on_evicted is not None:
                self._on_evicted(entry.key, entry.context, self._lru.cost_of(entry))
            self._lru.evict(entry)
            del self._entries[entry.key]
            self.explain(entry.key, "evicted")
            self.num_evicted += 1

    def would_keep(
        self, key: CacheKey, size_bytes: int, cost_seconds: float, *, other_bytes: int
    ) -> bool:
        """Whether a cache that nobody uses would stay, beside other bytes that are being filled.

        It would not where more valuable ones, or those in use, leave it no room.
        """
        needed_bytes = other_bytes + sum(entry.size_bytes for entry in self._detached)
        self._lru.put(key, size_bytes, cost_seconds)
        stays = key not in self._lru.victims(needed_bytes)
        self._lru.remove(key)
        return stays

    def _let_go(self, entry: Entry) -> None:
        if entry.pins or entry.is_growing:
            return
        self._detached.discard(entry)
        if entry in self._lru:
            self._lru.unpin(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._lru.remove(entry)
        if entry.pins:
            self._detached.add(entry)
