"""What to give up when a byte budget is full: the entry that is cheapest to bring back, per byte.

GreedyDual-Size, from Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms" (USITS 1997). An
entry is worth clock + cost / size as of its last use; the clock is the worth of what was last
evicted. So what is not used again falls behind, however dear it was, and among entries that
cost the same per byte the least recently used goes first. Pure: no I/O, no time.
"""

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvkeep_storage.errors import Invalid

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    cost_seconds: float
    worth: float
    used: int
    pins: int = 0


class CostAwareLru(Generic[Key]):
    """Keeps the books of a tier of ``budget_bytes``; what the keys stand for is the caller's.

    Nothing is evicted by itself: the caller asks for ``victims``, gives them up, and says so
    with ``evict``. A pinned entry is never a victim, so the budget may be exceeded while much is
    in use. Not safe for several threads.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Raises: Invalid for a negative budget; 0 keeps only what is pinned."""
        if budget_bytes < 0:
            raise Invalid("budget_bytes", f"{budget_bytes} is negative")
        self.budget_bytes = budget_bytes
        self._entries: dict[Key, _Entry] = {}
        self._size_bytes = 0
        self._clock = 0.0
        self._uses = 0

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries."""
        return self._size_bytes

    def size_of(self, key: Key) -> int:
        """Bytes of one entry. Raises: KeyError."""
        return self._entries[key].size_bytes

    def cost_of(self, key: Key) -> float:
        """Seconds to bring one entry back. Raises: KeyError."""
        return self._entries[key].cost_seconds

    @property
    def num_pinned(self) -> int:
        """Entries that are in use."""
        return sum(1 for entry in self._entries.values() if entry.pins)

    def put(self, key: Key, size_bytes: int, cost_seconds: float) -> None:
        """Enter what has just come, or its new size and cost; this counts as a use.

        ``cost_seconds`` is what it took, or would take, to bring it. Pins of an entry stay.
        Raises: Invalid for a negative size or cost, or one that is not a number.
        """
        if size_bytes < 0 or not cost_seconds >= 0.0:
            raise Invalid(
                "size_bytes, cost_seconds", f"{size_bytes}, {cost_seconds}: never less than 0"
            )
        before = self._entries.get(key)
        self._size_bytes += size_bytes - (before.size_bytes if before else 0)
        pins = before.pins if before else 0
        self._entries[key] = _Entry(size_bytes, cost_seconds, 0.0, 0, pins)
        self.touch(key)

    def touch(self, key: Key) -> None:
        """Count a use of an entry."""
        entry = self._entries[key]
        self._uses += 1
        entry.used = self._uses
        entry.worth = self._clock + entry.cost_seconds / max(1, entry.size_bytes)

    def pin(self, key: Key) -> None:
        """Keep an entry from being a victim until ``unpin`` was called as often."""
        self._entries[key].pins += 1

    def unpin(self, key: Key) -> None:
        """Take one pin back."""
        entry = self._entries[key]
        assert entry.pins > 0, "taken back more often than given"
        entry.pins -= 1

    def victims(self, needed_bytes: int = 0) -> list[Key]:
        """What to evict, in this order, so that ``needed_bytes`` more stay in the budget.

        No more than that needs; too little when what is left is pinned. Modifies nothing.
        """
        excess_bytes = self._size_bytes + needed_bytes - self.budget_bytes
        if excess_bytes <= 0:
            return []
        found: list[Key] = []
        # No two were used at once, so the keys themselves are never compared.
        heap = [(e.worth, e.used, key) for key, e in self._entries.items() if not e.pins]
        heapq.heapify(heap)
        while heap and excess_bytes > 0:
            key = heapq.heappop(heap)[-1]
            found.append(key)
            excess_bytes -= self._entries[key].size_bytes
        return found

    def evict(self, key: Key) -> None:
        """Strike out a victim; whatever is used from now on is worth more than it was."""
        self._clock = max(self._clock, self._entries[key].worth)
        self.remove(key)

    def remove(self, key: Key) -> None:
        """Strike out what has gone for another reason than room. Missing keys are ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size_bytes -= entry.size_bytes
