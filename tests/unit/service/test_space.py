from pathlib import Path

import pytest

from kvkeep_service.space import Space
from kvkeep_storage.errors import Full, ObjectsUnavailable
from kvkeep_storage.objects import Objects

from ...support.stores import files_below

pytestmark = pytest.mark.anyio


class Disk(Objects):
    """A real directory with so many bytes left."""

    left_bytes = 100
    probes = 0

    async def put(self, key: str, content: bytes) -> None:
        self.probes += 1
        if len(content) > self.left_bytes:
            raise Full(key, len(content))
        await super().put(key, content)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_builds_wait_until_there_is_space_for_what_found_none(tmp_path: Path) -> None:
    disk, clock = Disk.open(f"file://{tmp_path}"), Clock()
    space = Space(disk, clock)
    assert await space.is_there()
    space.ran_out(200)
    assert not await space.is_there()
    assert disk.probes == 0, "asked at once"
    clock.now = 16
    assert not await space.is_there()
    assert (disk.probes, space.is_full) == (1, True)
    disk.left_bytes = 200
    clock.now = 40
    assert await space.is_there()
    assert not space.is_full
    assert files_below(tmp_path) == []


async def test_a_store_that_does_not_answer_the_probe_is_asked_again(tmp_path: Path) -> None:
    class Away(Objects):
        async def put(self, key: str, content: bytes) -> None:
            raise ObjectsUnavailable("put", "away")

    clock = Clock()
    space = Space(Away.open(f"file://{tmp_path}"), clock)
    space.ran_out(200)
    clock.now = 16
    # An outage must not use up the attempts of a build either.
    assert not await space.is_there()
    assert space.is_full


async def test_a_cache_larger_than_any_probe_is_tried_ever_more_rarely(tmp_path: Path) -> None:
    disk, clock = Disk.open(f"file://{tmp_path}"), Clock()
    disk.left_bytes = 2**30
    space = Space(disk, clock)
    waits = []
    for _ in range(9):
        space.ran_out(2**40)
        began = clock.now
        while not await space.is_there():
            clock.now += 15
        waits.append(clock.now - began)
    assert waits[:4] == [15, 30, 60, 120]
    assert waits[-1] == 900
    space.was_enough()
    space.ran_out(10)
    clock.now += 15
    assert await space.is_there()
