"""A disk that fills up, for real: ``storage_full``, nothing torn, well again with space."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep_storage.documents import get_mirror, mirror_context
from kvkeep_storage.errors import Full, NotFound
from kvkeep_storage.objects import Objects
from kvkeep_storage.quotas import Usage
from kvkeep_storage.sweeper import Sweeper

from ..support.caches import assert_equal_rows, facts_for, random_rows
from ..support.stores import TENANT, Stores, entries_below, files_below
from .soak.storage_calls import Calls, Place

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

SMALL = random_rows(head_dim=64, rows_max=20)
LARGE = random_rows(head_dim=64, rows_max=3000)
FACTS = facts_for(SMALL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class FillsUp(Objects):
    """A local store whose disk is full from the moment an object of some name is to be written."""

    name: str
    ballast: Path

    @classmethod
    def before(cls, name: str, root: Path) -> "FillsUp":
        objects = cls.open(root.as_uri())
        objects.name, objects.ballast = name, root / "ballast"
        return objects

    async def put(self, key: str, content: bytes) -> None:
        self._fill_at(key)
        await super().put(key, content)

    async def put_if_absent(self, key: str, content: bytes) -> None:
        self._fill_at(key)
        await super().put_if_absent(key, content)

    def _fill_at(self, key: str) -> None:
        if key.endswith(self.name):
            _fill(self.ballast)


async def _on(small_disk: Path, stores: Stores) -> Stores:
    """The records of ``stores``, emptied, and a new object store on the small disk."""
    await stores.metadata.link.command("FLUSHALL")
    return await Stores.open(small_disk, stores.metadata)


async def test_a_full_disk_leaves_nothing_half_visible_and_what_was_there_answers(
    stores: Stores, small_disk: Path
) -> None:
    large = facts_for(LARGE, token_ids_digest="large")
    disk = await _on(small_disk, stores)
    await disk.register(FACTS)
    await disk.register(large, "ctx_02")
    cache = await disk.build(SMALL, FACTS)
    before = entries_below(small_disk)
    with pytest.raises(Full):
        await disk.build(LARGE, large)
    assert entries_below(small_disk) == before
    with pytest.raises(NotFound):
        await disk.load(large)
    assert_equal_rows((await disk.load(FACTS)).rows, SMALL)
    # Full to the last byte, it can still be swept.
    _fill(small_disk / "ballast")
    await disk.metadata.delete_context(TENANT, "ctx_01")
    for name in files_below(small_disk, "caches"):
        os.utime(small_disk / name, (1, 1))
    report = await Sweeper(disk.objects, disk.metadata, disk.leases, 60).run_once()
    assert (report.orphan_generations, report.freed_bytes) == (1, cache.stored_bytes)


@pytest.mark.parametrize("name", ["document.json", "context.json"])
async def test_a_registration_that_meets_a_full_disk_leaves_nothing(
    stores: Stores, valkey_url: str, small_disk: Path, name: str
) -> None:
    await _on(small_disk, stores)
    async with Calls.open(Place.local(valkey_url, small_disk)) as calls:
        before = entries_below(small_disk)
        objects = FillsUp.before(name, small_disk)
        with pytest.raises(Full) as caught:
            await calls.on(objects).register(TENANT, 1, 0.3, None)
        assert caught.value.code == "storage_full"
        objects.ballast.unlink()
        assert entries_below(small_disk) == before
        assert await stores.metadata.usage(TENANT) == Usage(0, 0, 0)
        record = await calls.register(TENANT, 1, 0.3, None)
        assert await stores.metadata.context(TENANT, record.id) == record


@pytest.mark.parametrize("name", ["kv-00.safetensors", "kv-02.safetensors", "manifest.json"])
async def test_a_commit_that_meets_a_full_disk_leaves_nothing_and_can_be_repeated(
    stores: Stores, small_disk: Path, name: str
) -> None:
    disk = await _on(small_disk, stores)
    await disk.register(FACTS)
    before = entries_below(small_disk)
    whole, disk.objects = disk.objects, FillsUp.before(name, small_disk)
    with pytest.raises(Full):
        await disk.build(SMALL, FACTS)
    disk.objects.ballast.unlink()
    assert entries_below(small_disk) == before
    record = await stores.metadata.context(TENANT, "ctx_01")
    assert record is not None
    assert record.status == "queued"
    disk.objects = whole
    await disk.build(SMALL, FACTS)
    assert_equal_rows((await disk.load(FACTS)).rows, SMALL)


async def test_a_mirror_that_meets_a_full_disk_undoes_no_commit_and_is_written_later(
    stores: Stores, small_disk: Path
) -> None:
    disk = await _on(small_disk, stores)
    key = await disk.register(FACTS)
    objects = FillsUp.before("context.json", small_disk)
    whole, disk.objects = disk.objects, objects
    cache = await disk.build(SMALL, FACTS)
    assert_equal_rows((await disk.load(FACTS)).rows, SMALL)
    disk.objects = whole
    # The one before is still there, whole.
    assert (await get_mirror(whole, key)).generation is None
    objects.ballast.unlink()
    await mirror_context(whole, disk.metadata, key)
    assert (await get_mirror(whole, key)).generation == cache.generation


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size_bytes in (4096, 1):
            try:
                while True:
                    file.write(bytes(size_bytes))
            except OSError:
                continue
