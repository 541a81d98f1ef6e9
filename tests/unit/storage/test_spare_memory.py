"""Memory is used again by one owner at a time, and cleared ahead of those who fill it."""

import resource
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvkeep_storage.artifact import RowBytes
from kvkeep_storage.spare_memory import SpareMemory, cleared_ahead, new_room

SIZE = 5 * 1024 * 1024 + 7


def _marked(memory: SpareMemory, size_bytes: int = SIZE) -> RowBytes:
    room = memory.room(size_bytes)
    room[:] = 7
    return room


def test_what_was_given_back_is_given_again() -> None:
    memory = SpareMemory()
    room = _marked(memory)
    address = room.ctypes.data
    del room
    again = memory.room(SIZE - 100)
    assert again.ctypes.data == address
    assert again.nbytes == SIZE - 100


KEEPING: dict[str, Callable[[RowBytes], object]] = {
    "the array": lambda room: room,
    "a part of it": lambda room: room[100:200],
    "a part of a part": lambda room: room[64 : 64 + 4096].reshape(-1, 64)[3:].view(np.int32)[1],
    "a view of bytes": lambda room: room.data,
    "a piece of a view": lambda room: room[64:].data.cast("B")[10:20],
    "an array of a view": lambda room: np.frombuffer(room[64:].data[10:20], np.uint8),
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING.keys())
def test_memory_that_anybody_can_still_see_is_given_to_nobody_else(
    keep: Callable[[RowBytes], object],
) -> None:
    memory = SpareMemory()
    room = memory.room(SIZE)
    address = room.ctypes.data
    kept = keep(room)
    del room
    other = memory.room(SIZE)
    assert other.ctypes.data != address
    del kept
    assert memory.room(SIZE).ctypes.data == address


@pytest.mark.parametrize(("kept_bytes", "size_bytes"), [(SIZE, 2 * SIZE), (3 * SIZE, SIZE)])
def test_a_room_of_quite_another_size_is_left_for_others(kept_bytes: int, size_bytes: int) -> None:
    memory = SpareMemory()
    address = _marked(memory, kept_bytes).ctypes.data
    other = memory.room(size_bytes)
    assert other.nbytes == size_bytes
    assert not other.any()
    assert memory.room(kept_bytes).ctypes.data == address


def test_only_a_few_rooms_are_kept() -> None:
    memory = SpareMemory()
    rooms = [_marked(memory) for _ in range(9)]
    rooms.clear()
    again = [memory.room(SIZE) for _ in range(9)]
    # New memory is clear.
    assert sum(bool(room.any()) for room in again) <= 4


def test_what_is_to_be_forgotten_is_not_kept() -> None:
    memory = SpareMemory()
    used = _marked(memory)
    _marked(memory)
    memory.clear()
    # New memory is clear.
    assert not memory.room(SIZE).any()
    assert used.all()


@pytest.mark.parametrize("size_bytes", [0, 1, 100])
def test_what_is_small_is_not_worth_keeping(size_bytes: int) -> None:
    memory = SpareMemory()
    assert memory.room(size_bytes).nbytes == size_bytes


def test_more_than_there_is_cannot_be_had() -> None:
    with pytest.raises(MemoryError):
        SpareMemory().room(1 << 60)


def test_two_threads_never_get_the_same_memory() -> None:
    memory = SpareMemory()
    shared: list[int] = []

    def use(mark: int) -> None:
        for _ in range(200):
            room = memory.room(SIZE)
            room[:: SIZE // 64] = mark
            if (room[:: SIZE // 64] != mark).any():
                shared.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared == []


def _wait_until_cleared() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvkeep-clear":
            thread.join()


def test_memory_that_was_cleared_ahead_is_there_when_it_is_written() -> None:
    room = cleared_ahead(SpareMemory().room)(64 * 1024 * 1024 + 7)
    _wait_until_cleared()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    room[::4096] = 1
    room[-1] = 1
    # At least one for each of 32 large pages, had they still to be given.
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 8


def test_what_is_written_while_memory_is_cleared_ahead_stays() -> None:
    room = cleared_ahead(new_room)(64 * 1024 * 1024 + 7)
    # From the end on, so that the two meet.
    room[::-1] = np.arange(room.nbytes, dtype=np.uint32).astype(np.uint8)
    _wait_until_cleared()
    assert (room[::-1] == np.arange(room.nbytes, dtype=np.uint32).astype(np.uint8)).all()


def test_clearing_ahead_keeps_no_memory_from_the_next_owner() -> None:
    memory = SpareMemory()
    room = cleared_ahead(memory.room)(64 * 1024 * 1024)
    address = room.ctypes.data
    del room
    _wait_until_cleared()
    assert memory.room(64 * 1024 * 1024).ctypes.data == address


def test_small_memory_is_not_worth_a_thread() -> None:
    before = threading.active_count()
    room = cleared_ahead(new_room)(2 * 1024 * 1024 - 1)
    assert threading.active_count() == before
    assert room.nbytes == 2 * 1024 * 1024 - 1
