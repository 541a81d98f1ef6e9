"""The embedded Valkey on a disk that is full for a while."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import MetadataUnavailable
from kvkeep_storage.metadata import Metadata

from ..support.stores import TENANT, context_for
from .commit_process import FACTS

pytestmark = [pytest.mark.anyio, pytest.mark.fault]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_refuses_writes_says_so_and_recovers_with_every_record(
    small_disk: Path,
) -> None:
    store = EmbeddedStore(small_disk)
    store.start()
    metadata = await Metadata.connect(store.redis_url)
    try:
        await metadata.create_context(context_for(FACTS, "ctx_01"))
        fill(small_disk / "filler")
        with pytest.raises(MetadataUnavailable, match="AOF"):
            await write_for_ever(metadata)
        with pytest.raises(MetadataUnavailable):
            await metadata.create_context(context_for(FACTS, "ctx_02"))
        assert await metadata.context(TENANT, "ctx_01") is not None
        (small_disk / "filler").unlink()
        await until_it_takes_writes(metadata)
        await metadata.create_context(context_for(FACTS, "ctx_03"))
        await asyncio.to_thread(store.stop)
        await asyncio.to_thread(store.start)
        found = await metadata.contexts(TENANT, limit=10)
        assert [record.id for record in found.records] == ["ctx_01", "ctx_03"]
    finally:
        await metadata.close()
        store.stop()


def fill(path: Path) -> None:
    """Leave no room for another block."""
    with path.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))


async def write_for_ever(metadata: Metadata) -> None:
    while True:
        await metadata.probe_writes()


async def until_it_takes_writes(metadata: Metadata) -> None:
    # It looks once a second whether there is space again.
    async with asyncio.timeout(60):
        while True:
            try:
                await metadata.probe_writes()
            except MetadataUnavailable:
                await asyncio.sleep(0.01)
            else:
                return
