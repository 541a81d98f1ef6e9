"""Whatever goes wrong with the disk, or with others that use it, the load goes on."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvkeep_storage import disk_files, disk_fill, disk_health, disk_tier
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.errors import ObjectsUnavailable
from kvkeep_storage.pieces import Filled

from ...support.disk_tiers import (
    KEY,
    CountedObjects,
    OpenTier,
    begun,
    content_of,
    copies,
    read,
    settled,
)

pytestmark = pytest.mark.anyio

CHUNK_BYTES = 1000
CONTENT = content_of(4 * CHUNK_BYTES + 304)
SLAB = KEY.slab(0)

# Fills a part for ever, as far as anybody can see.
HOLDER = """
import fcntl, os, sys, time
part = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(part, fcntl.LOCK_EX)
os.write(part, bytes(4304))
print("held", flush=True)
while True:
    time.sleep(float(sys.argv[2]))
    os.pwrite(part, b"x", 0)
"""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_fill, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
async def objects(tmp_path: Path) -> CountedObjects:
    found = CountedObjects.at(tmp_path / "objects")
    await found.store_id()
    await found.put(SLAB, CONTENT)
    await found.put(KEY.slab(1), CONTENT[::-1])
    await found.put(KEY.manifest, b"{}")
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
async def copy(objects: CountedObjects, disk: Path) -> Path:
    """Where the copy of the slab is, or will be."""
    return disk / f"store-{await objects.store_id()}" / SLAB


@pytest.fixture
def small_disk(disk: Path) -> Iterator[Path]:
    """A file system of some pages."""
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def content_at(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def remove_all(disk: Path) -> None:
    for store in disk.glob("store-*"):
        shutil.rmtree(store)


async def test_a_full_disk_means_not_kept_and_what_is_kept_is_still_read(
    objects: CountedObjects, open_tier: OpenTier, small_disk: Path
) -> None:
    tier = open_tier(objects)
    await read(tier, SLAB, 0, 4304)
    await settled(tier)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    for _ in range(3):
        assert await read(tier, KEY.slab(1), 0, 4304) == CONTENT[::-1]
        assert await tier.get(KEY.manifest) == b"{}"
        await settled(tier)
    assert [path.name for path in copies(small_disk)] == ["kv-00.safetensors"]
    # One failure, and then the disk is left alone.
    assert tier.stats().errors == 1
    objects.reads.clear()
    assert await read(tier, SLAB, 0, 4304) == CONTENT
    assert objects.of_slabs() == 0
    # With space again, a later attempt succeeds.
    ballast.unlink()
    later = open_tier(objects)
    await read(later, KEY.slab(1), 0, 4304)
    await settled(later)
    assert len(copies(small_disk)) == 2


async def test_a_copy_that_cannot_be_read_is_passed_by(
    objects: CountedObjects, open_tier: OpenTier, copy: Path
) -> None:
    tier = open_tier(objects)
    make_folder(copy)
    for _ in range(3):
        assert await read(tier, SLAB, 0, 4304) == CONTENT
        await settled(tier)
    assert tier.stats().errors == 1


async def test_a_copy_that_ends_early_is_passed_by_and_removed(
    objects: CountedObjects, open_tier: OpenTier, copy: Path
) -> None:
    tier = open_tier(objects)
    put(copy, CONTENT[:-1])
    assert await read(tier, SLAB, 4000, 304) == CONTENT[4000:]
    assert content_at(copy) is None
    assert await read(tier, SLAB, 0, 4304) == CONTENT
    await settled(tier)
    assert content_at(copy) == CONTENT


async def test_a_disk_that_hangs_ends_the_read_as_abandoned_and_is_left_alone(
    objects: CountedObjects, open_tier: OpenTier, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may wake up later: nobody may be using the same buffers by then."""
    monkeypatch.setattr(disk_tier, "_DISK_SECONDS", 0.3)
    tier = open_tier(objects)
    make_folder(copy.parent)
    # To open it blocks until somebody writes to it.
    os.mkfifo(copy)
    try:
        with pytest.raises(ObjectsUnavailable) as caught:
            await read(tier, SLAB, 0, 4304)
        assert caught.value.abandoned
        assert await read(tier, SLAB, 0, 4304) == CONTENT
    finally:
        # Or the thread would never end.
        os.close(os.open(copy, os.O_WRONLY))


async def test_the_disk_is_tried_again_after_a_pause(
    objects: CountedObjects, open_tier: OpenTier, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_health, "_PAUSE_SECONDS", 0.0)
    tier = open_tier(objects)
    make_folder(copy)
    assert await read(tier, SLAB, 0, 4304) == CONTENT
    os.rmdir(copy)
    assert await read(tier, SLAB, 0, 4304) == CONTENT
    await settled(tier)
    assert content_at(copy) == CONTENT


async def test_a_store_that_fails_half_way_leaves_nothing_and_its_error_is_the_readers(
    objects: CountedObjects, open_tier: OpenTier, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(CountedObjects):
        async def read_ranges(
            self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
        ) -> None:
            if start + sum(map(len, into)) > 2000:
                raise ObjectsUnavailable("read", "away")
            await super().read_ranges(key, start, into, on_filled)

    failing = Failing.at(disk.parent / "objects")
    tier = open_tier(failing)
    with pytest.raises(ObjectsUnavailable):
        await read(tier, SLAB, 0, 4304)
    # What had come before is right.
    assert await read(tier, SLAB, 0, 2000) == CONTENT[:2000]
    await settled(tier)
    assert copies(disk) == []
    assert tier.stats().errors == 0


async def test_closing_in_the_middle_of_a_fill_leaves_nothing(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    tier = open_tier(objects)
    objects.gate.clear()
    reading = asyncio.create_task(read(tier, SLAB, 0, 4304))
    await begun(disk)
    await tier.close()
    objects.gate.set()
    assert await reading == CONTENT
    assert copies(disk) == []


# --- other processes ---------------------------------------------------------------------------


async def test_two_processes_that_want_one_slab_fetch_it_once(
    objects: CountedObjects, open_tier: OpenTier
) -> None:
    ours, theirs = open_tier(objects), open_tier(objects)
    found = await asyncio.gather(*(read(tier, SLAB, 0, 4304) for tier in (ours, theirs, ours)))
    assert found == [CONTENT] * 3
    assert objects.of_slabs() == 5


def hold(copy: Path, write_every_seconds: float) -> "subprocess.Popen[str]":
    """Another process that fills the slab."""
    copy.parent.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, f"{copy}.part", str(write_every_seconds)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


async def test_a_process_that_dies_while_it_fills_is_followed_by_the_next(
    objects: CountedObjects, open_tier: OpenTier, copy: Path
) -> None:
    tier = open_tier(objects)
    with hold(copy, 0.05) as holder:
        reading = asyncio.create_task(read(tier, SLAB, 0, 4304))
        await asyncio.sleep(0.5)
        assert not reading.done()
        holder.kill()
    assert await reading == CONTENT
    await settled(tier)
    assert content_at(copy) == CONTENT
    assert objects.of_slabs() == 5


async def test_a_process_that_hangs_while_it_fills_is_not_waited_for(
    objects: CountedObjects, open_tier: OpenTier, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_fill, "_STALLED_SECONDS", 0.2)
    await _is_passed_by(open_tier(objects), copy, 3600)


async def test_a_process_that_fills_for_ever_is_not_waited_for(
    objects: CountedObjects, open_tier: OpenTier, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_fill, "_WAIT_SECONDS", 0.4)
    await _is_passed_by(open_tier(objects), copy, 0.01)


async def _is_passed_by(tier: DiskTier, copy: Path, write_every_seconds: float) -> None:
    with hold(copy, write_every_seconds) as holder:
        for _ in range(2):
            async with asyncio.timeout(30):
                assert await read(tier, SLAB, 0, 4304) == CONTENT
        assert [path.name for path in copies(copy.parents[5])] == ["kv-00.safetensors.part"]
        holder.kill()


async def test_a_directory_that_is_removed_meanwhile_is_made_again(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    tier = open_tier(objects)
    await read(tier, SLAB, 0, 4304)
    await settled(tier)
    remove_all(disk)
    await read(tier, SLAB, 0, 4304)
    assert await read(tier, KEY.slab(1), 0, 4304) == CONTENT[::-1]
    await settled(tier)
    assert [path.name for path in copies(disk)] == ["kv-01.safetensors"]


async def test_a_directory_that_is_gone_when_it_is_looked_after_is_no_trouble(
    objects: CountedObjects, open_tier: OpenTier, disk: Path
) -> None:
    tier = open_tier(objects)
    await read(tier, SLAB, 0, 4304)
    await settled(tier)
    shutil.rmtree(disk)
    await tier.reclaim()
    assert (tier.stats().errors, tier.stats().size_bytes) == (0, 0)
    assert await read(tier, KEY.slab(1), 0, 4304) == CONTENT[::-1]
    await settled(tier)
    assert [path.name for path in copies(disk)] == ["kv-01.safetensors"]


async def test_a_disk_that_writes_slowly_does_not_hold_up_the_load(
    objects: CountedObjects, open_tier: OpenTier, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_fill, "CHUNK_BYTES", 300)
    go_on = threading.Event()
    write = disk_files.Part.write

    def slow_write(self: disk_files.Part, content: memoryview, offset: int) -> None:
        assert go_on.wait(30)
        write(self, content, offset)

    monkeypatch.setattr(disk_files.Part, "write", slow_write)
    tier = open_tier(objects)
    try:
        async with asyncio.timeout(20):
            assert await read(tier, SLAB, 0, 4304) == CONTENT
        assert content_at(copy) is None
    finally:
        go_on.set()
    await settled(tier)
    assert content_at(copy) == CONTENT
