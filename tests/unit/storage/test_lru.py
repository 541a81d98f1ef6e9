"""The cost-aware LRU against a naive model, and the promises its callers build on."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep_storage.errors import Invalid
from kvkeep_storage.lru import CostAwareLru

KEYS = st.sampled_from("abcdefg")
SIZES = st.integers(0, 40)
COSTS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 100.0])


def filled(budget_bytes: int, **entries: tuple[int, float]) -> CostAwareLru[str]:
    lru: CostAwareLru[str] = CostAwareLru(budget_bytes)
    for key, (size_bytes, cost_seconds) in entries.items():
        lru.put(key, size_bytes, cost_seconds)
    return lru


def evict_all(lru: CostAwareLru[str]) -> list[str]:
    """The order in which everything would go."""
    order = lru.victims(lru.budget_bytes + 1)
    for key in order:
        lru.evict(key)
    return order


def test_at_equal_cost_per_byte_the_least_recently_used_goes_first() -> None:
    lru = filled(100, a=(10, 1.0), b=(20, 2.0), c=(30, 3.0))
    lru.touch("a")
    assert evict_all(lru) == ["b", "c", "a"]


def test_what_is_dear_to_bring_back_per_byte_outlives_what_was_used_later() -> None:
    assert evict_all(filled(100, dear=(10, 9.0), cheap=(10, 1.0))) == ["cheap", "dear"]
    assert evict_all(filled(100, small=(1, 1.0), large=(90, 1.0))) == ["large", "small"]


def test_what_is_never_used_again_goes_however_dear_it_was() -> None:
    lru = filled(20, dear=(10, 5.0))
    survived = 0
    while "dear" in lru:
        survived += 1
        for victim in lru.victims(10):
            lru.evict(victim)
        lru.put(f"cheap {survived}", 10, 1.0)
    # Worth 0.5 a byte, against a clock that each of the others moves on by 0.1.
    assert 4 <= survived <= 7


def test_only_as_much_as_is_needed_goes() -> None:
    lru = filled(100, a=(30, 1.0), b=(30, 1.0), c=(40, 1.0))
    assert lru.victims() == []
    assert lru.victims(0) == []
    assert lru.victims(1) == ["c"]
    assert lru.victims(40) == ["c"]
    assert lru.victims(41) == ["c", "a"]
    assert len(lru) == 3


def test_a_pinned_entry_is_never_a_victim_and_the_budget_gives_way() -> None:
    lru = filled(10, held=(50, 0.0), free=(5, 9.0))
    lru.pin("held")
    lru.pin("held")
    assert lru.victims() == ["free"]
    lru.unpin("held")
    lru.put("held", 60, 0.0)
    assert (lru.victims(), lru.size_bytes, lru.num_pinned) == (["free"], 65, 1)
    lru.unpin("held")
    assert (lru.victims(), lru.num_pinned) == (["held"], 0)


def test_a_budget_of_nothing_keeps_nothing() -> None:
    assert filled(0, a=(1, 1.0), empty=(0, 1.0)).victims() == ["a"]


@pytest.mark.parametrize(("size_bytes", "cost"), [(-1, 0.0), (1, -0.5), (1, math.nan)])
def test_a_size_or_cost_below_nothing_is_refused(size_bytes: int, cost: float) -> None:
    lru: CostAwareLru[str] = CostAwareLru(10)
    with pytest.raises(Invalid):
        lru.put("a", size_bytes, cost)
    assert len(lru) == 0


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(Invalid, match="budget_bytes"):
        CostAwareLru(-1)


@dataclass
class Naive:
    """One entry of the model: a plain list in order of use, searched from end to end."""

    key: str
    size_bytes: int
    cost_seconds: float
    clock: float
    pins: int = 0

    @property
    def worth(self) -> float:
        return self.clock + self.cost_seconds / max(1, self.size_bytes)


class Compared(RuleBasedStateMachine):
    """Whatever is done to it, the books agree with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.lru: CostAwareLru[str] = CostAwareLru(60)
        self.used: list[Naive] = []
        self.clock = 0.0

    def find(self, key: str) -> Naive | None:
        return next((entry for entry in self.used if entry.key == key), None)

    @rule(key=KEYS, size_bytes=SIZES, cost=COSTS)
    def put(self, key: str, size_bytes: int, cost: float) -> None:
        self.lru.put(key, size_bytes, cost)
        found = self.find(key)
        entry = Naive(key, size_bytes, cost, self.clock, found.pins if found else 0)
        self.used = [other for other in self.used if other.key != key] + [entry]

    @rule(key=KEYS)
    def touch(self, key: str) -> None:
        found = self.find(key)
        if found is None:
            with pytest.raises(KeyError):
                self.lru.touch(key)
            return
        self.lru.touch(key)
        found.clock = self.clock
        self.used.remove(found)
        self.used.append(found)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        found = data.draw(st.sampled_from(self.used))
        if found.pins and data.draw(st.booleans()):
            self.lru.unpin(found.key)
            found.pins -= 1
        else:
            self.lru.pin(found.key)
            found.pins += 1

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        self.lru.remove(key)
        self.used = [entry for entry in self.used if entry.key != key]

    @rule(needed=SIZES)
    def make_room(self, needed: int) -> None:
        expected = []
        left = list(self.used)
        while sum(entry.size_bytes for entry in left) + needed > 60:
            free = [entry for entry in left if not entry.pins]
            if not free:
                break
            # The first of the cheapest is the least recently used of them.
            victim = min(free, key=lambda entry: entry.worth)
            expected.append(victim.key)
            left.remove(victim)
            self.clock = max(self.clock, victim.worth)
        assert self.lru.victims(needed) == expected
        for key in expected:
            self.lru.evict(key)
        self.used = left

    @invariant()
    def the_books_agree(self) -> None:
        assert set(self.lru) == {entry.key for entry in self.used}
        assert self.lru.size_bytes == sum(entry.size_bytes for entry in self.used)
        assert self.lru.num_pinned == sum(1 for entry in self.used if entry.pins)
        assert all(entry.key in self.lru for entry in self.used)


TestCompared = Compared.TestCase
TestCompared.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
