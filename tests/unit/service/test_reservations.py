"""One bound on memory: answers are refused, builds wait, and idle caches give way."""

import asyncio
from contextlib import ExitStack

import pytest

from kvkeep_service.errors import MemoryShort
from kvkeep_service.reservations import BuildTooLarge, Reservations

pytestmark = pytest.mark.anyio


class Caches:
    """Stands for the caches in use."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.left: list[int] = []

    def reservations(self, size_bytes: int) -> Reservations:
        made = Reservations(size_bytes, lambda: self.used_bytes, self._reserved)
        self._made = made
        return made

    def _reserved(self) -> None:
        self.left.append(self._made.left_for_caches)


def test_answers_are_let_in_while_they_fit_and_caches_are_told_what_is_left() -> None:
    caches = Caches()
    memory = caches.reservations(100)
    caches.used_bytes = 30
    with ExitStack() as held:
        held.enter_context(memory.for_answer(40))
        held.enter_context(memory.for_answer(30))
        with pytest.raises(MemoryShort) as refused, memory.for_answer(1):
            pass
        assert refused.value.code == "overloaded"
        assert refused.value.retry_after_seconds >= 1
        assert memory.held_bytes == 70
    assert memory.held_bytes == 0
    assert caches.left == [60, 30]


def test_a_lone_answer_is_let_in_whatever_it_needs() -> None:
    memory = Caches().reservations(100)
    with memory.for_answer(1000), pytest.raises(MemoryShort), memory.for_answer(1):
        pass
    assert memory.held_bytes == 0


def test_what_the_engine_takes_for_itself_is_nobodys_until_it_is_given_back() -> None:
    caches = Caches()
    memory = caches.reservations(100)
    memory.withhold(60)
    with memory.for_answer(30), pytest.raises(MemoryShort), memory.for_answer(20):
        pass
    memory.withhold(-60)
    assert memory.left_for_caches == 100
    assert caches.left == [40, 10, 100]


async def test_a_build_waits_until_it_fits_and_one_that_never_will_is_refused() -> None:
    caches = Caches()
    memory = caches.reservations(100)
    caches.used_bytes = 50
    begun = asyncio.Event()

    async def build() -> int:
        async with memory.for_build(60):
            begun.set()
            return memory.held_bytes

    building = asyncio.create_task(build())
    with memory.for_answer(10):
        pass
    await asyncio.sleep(0)
    assert not begun.is_set()
    caches.used_bytes = 40
    memory.freed()
    assert await building == 60
    assert memory.held_bytes == 0
    with pytest.raises(BuildTooLarge, match=r"needs 101 bytes .* allows 100"):
        async with memory.for_build(101):
            pass


async def test_a_build_that_is_cancelled_while_it_waits_holds_nothing() -> None:
    memory = Caches().reservations(100)

    async def build() -> None:
        async with memory.for_build(100):
            raise AssertionError("it fits")

    with memory.for_answer(1):
        building = asyncio.create_task(build())
        await asyncio.sleep(0)
        building.cancel()
        await asyncio.wait([building])
        assert building.cancelled()
        assert memory.held_bytes == 1
