import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep_storage.errors import Full, NotFound
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.sweeper import Sweeper

from ..support.caches import assert_equal_rows, facts_for, random_rows
from ..support.stores import Stores, entries_below, files_below

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

SMALL = random_rows(head_dim=64, rows_max=20)
LARGE = random_rows(head_dim=64, rows_max=3000)


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


async def test_a_full_disk_leaves_nothing_half_visible_and_what_was_there_answers(
    stores: Stores, small_disk: Path
) -> None:
    metadata: Metadata = stores.metadata
    await metadata.link.command("FLUSHALL")
    small, large = facts_for(SMALL), facts_for(LARGE, token_ids_digest="large")
    disk = await Stores.open(small_disk, metadata)
    await disk.register(small)
    await disk.register(large, "ctx_02")
    cache = await disk.build(SMALL, small)
    before = entries_below(small_disk)
    with pytest.raises(Full):
        await disk.build(LARGE, large)
    assert entries_below(small_disk) == before
    with pytest.raises(NotFound):
        await disk.load(large)
    assert_equal_rows((await disk.load(small)).rows, SMALL)
    # Full to the last byte, it can still be swept.
    _fill(small_disk / "ballast")
    await metadata.delete_context("acme", "ctx_01")
    for name in files_below(small_disk, "caches"):
        os.utime(small_disk / name, (1, 1))
    report = await Sweeper(disk.objects, metadata, disk.leases, 60).run_once()
    assert (report.orphan_generations, report.freed_bytes) == (1, cache.stored_bytes)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
