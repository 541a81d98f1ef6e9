"""Tenants in turn: who comes next, and who gives way when a queue is full."""

from dataclasses import dataclass

import pytest

from kvkeep_service.engine.fair_queue import FairQueue


@dataclass(frozen=True)
class Waiting:
    tenant: str
    number: int


def filled(*tenants: str) -> FairQueue[Waiting]:
    queue: FairQueue[Waiting] = FairQueue()
    for number, tenant in enumerate(tenants):
        queue.put(Waiting(tenant, number))
    return queue


def taken(queue: FairQueue[Waiting]) -> list[tuple[str, int]]:
    return [(one.tenant, one.number) for one in (queue.take() for _ in range(len(queue)))]


def test_tenants_take_turns_and_each_tenants_own_stay_in_order() -> None:
    assert taken(filled("a", "a", "a", "b", "c", "b")) == [
        ("a", 0),
        ("b", 3),
        ("c", 4),
        ("a", 1),
        ("b", 5),
        ("a", 2),
    ]


def test_a_tenant_that_comes_back_waits_behind_those_who_have_not_had_their_turn() -> None:
    queue = filled("a", "b", "c")
    assert queue.take().tenant == "a"
    queue.put(Waiting("a", 9))
    assert [tenant for tenant, _ in taken(queue)] == ["b", "c", "a"]


def test_nobody_is_taken_from_an_empty_queue() -> None:
    with pytest.raises(KeyError):
        filled().take()


def test_who_gave_up_is_dropped_and_the_turns_stay() -> None:
    queue = filled("a", "a", "b", "c", "c")
    queue.discard(lambda one: one.number in (0, 2))
    assert len(queue) == 3
    assert taken(queue) == [("a", 1), ("c", 3), ("c", 4)]


@pytest.mark.parametrize(
    ("waiting", "newcomer", "displaced"),
    [
        ("aaab", "c", 2),
        ("aaab", "b", 2),
        ("aaab", "a", None),
        # Displacing would only change which of them is the longer line.
        ("aab", "b", None),
        ("abc", "d", None),
        ("", "a", None),
    ],
)
def test_a_full_queue_gives_up_the_newest_of_the_longest_line_for_a_shorter_one(
    waiting: str, newcomer: str, displaced: int | None
) -> None:
    queue = filled(*waiting)
    found = queue.displaced_by(Waiting(newcomer, 99))
    assert (found.number if found else None) == displaced
    assert len(queue) == len(waiting) - (found is not None)
