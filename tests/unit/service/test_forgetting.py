"""A deletion reaches memory and disk of every process, and nothing else leaves either."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvkeep_service.forgetting import forget_deleted
from kvkeep_service.removal import Remover
from kvkeep_service.stores import Stores
from kvkeep_storage.commit import commit
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.documents import DocumentBody, mirror_context, put_document
from kvkeep_storage.errors import MetadataUnavailable, StorageError, StoreMismatch
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.load import load, quarantine
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.records import CacheRecord
from kvkeep_storage.redis_link import RedisLink

from ...support.caches import facts_for, random_rows
from ...support.disk_tiers import copies, settled
from ...support.scripted_worker import ScriptedWorker
from ...support.stores import TENANT, a_document, context_for, files_below

pytestmark = pytest.mark.anyio

ROWS = random_rows()
FACTS = facts_for(ROWS)
CACHE_ID = FACTS.fingerprint.digest
OTHER = facts_for(ROWS, token_ids_digest="other")
MARKER = "Clause 7: the marker is a heron."


@dataclass(frozen=True, slots=True)
class Process:
    """What one server process holds: its view of the stores, its worker and its disk."""

    stores: Stores
    worker: ScriptedWorker
    folder: Path

    async def load(self) -> CacheRecord:
        stores = self.stores
        assert stores.disk is not None
        loaded = await load(
            stores.disk,
            stores.objects,
            stores.metadata,
            stores.leases,
            TENANT,
            CACHE_ID,
            expected=FACTS.fingerprint.model_identity,
            ratio=None,
        )
        await settled(stores.disk)
        self.worker.held.append((TENANT, CACHE_ID))
        return loaded.cache

    async def forget(self) -> None:
        await forget_deleted(self.stores, self.worker)

    def kept(self) -> set[str]:
        """The generations on its disk."""
        return {path.parent.name for path in copies(self.folder)}


@pytest.fixture(params=["one directory", "a directory each"])
async def processes(
    request: pytest.FixtureRequest, stores: Stores, tmp_path: Path
) -> AsyncIterator[tuple[Process, Process]]:
    """Two, on one store and one Redis."""
    opened = []
    for number in range(2):
        folder = (
            tmp_path / "disks" / ("shared" if request.param == "one directory" else f"{number}")
        )
        disk = DiskTier.open(stores.objects, folder, 10**9)
        own = replace(stores, disk=disk)
        opened.append(Process(own, ScriptedWorker(own), folder))
    yield opened[0], opened[1]
    for process in opened:
        assert process.stores.disk is not None
        await process.stores.disk.close()


async def register(stores: Stores, context_id: str = "ctx_01") -> None:
    key = DocumentKey(TENANT, context_id)
    body: DocumentBody = a_document(MARKER)
    await put_document(stores.objects, key, body)
    await stores.metadata.create_context(context_for(FACTS, context_id))
    await mirror_context(stores.objects, stores.metadata, key)


async def build(stores: Stores) -> CacheRecord:
    lease = await stores.leases.acquire_build(TENANT, CACHE_ID, "builder")
    assert lease is not None
    try:
        return await commit(stores.objects, stores.metadata, stores.leases, lease, ROWS, FACTS)
    finally:
        await stores.leases.release(lease)


def holding(folder: Path, *markers: bytes) -> list[str]:
    """Every file in which any of the markers stands."""
    return [
        name
        for name in files_below(folder)
        if any(marker in (folder / name).read_bytes() for marker in markers)
    ]


async def test_field_28_after_a_deletion_no_byte_of_document_or_cache_is_left_in_any_tier(
    processes: tuple[Process, Process], tmp_path: Path
) -> None:
    ours, theirs = processes
    await register(ours.stores)
    cache = await build(ours.stores)
    for process in processes:
        await process.load()
    row = ROWS.layers[0].k[0].tobytes()
    markers = (MARKER.encode(), row, cache.generation.encode())
    assert len(holding(tmp_path, *markers)) >= 4
    remover = Remover(ours.stores, ours.worker)
    assert await remover.remove_context(TENANT, "ctx_01")
    # At once where it was deleted, and within a round of upkeep everywhere else.
    assert ours.kept() == set()
    assert ours.worker.resident() == []
    await theirs.forget()
    assert theirs.kept() == set()
    assert theirs.worker.resident() == []
    assert holding(tmp_path, *markers) == []
    await remover.close()


async def test_what_records_name_stays_and_so_does_what_is_about_to_be_committed(
    processes: tuple[Process, Process],
) -> None:
    ours, _ = processes
    await register(ours.stores)
    cache = await build(ours.stores)
    await ours.load()
    # Adopted by its builder; its record comes with the commit.
    await ours.stores.metadata.create_context(context_for(OTHER, "ctx_02"))
    ours.worker.held.append((TENANT, OTHER.fingerprint.digest))
    await ours.forget()
    assert ours.worker.dropped == []
    assert ours.kept() == {cache.generation}


async def test_a_copy_of_a_generation_that_was_replaced_goes_and_memory_stays(
    processes: tuple[Process, Process],
) -> None:
    ours, theirs = processes
    await register(ours.stores)
    await build(ours.stores)
    await theirs.load()
    newer = await build(ours.stores)
    await ours.load()
    await theirs.forget()
    assert theirs.kept() <= {newer.generation}
    assert theirs.worker.dropped == []


async def test_a_quarantine_by_another_process_takes_the_copies(
    processes: tuple[Process, Process],
) -> None:
    ours, theirs = processes
    await register(ours.stores)
    cache = await build(ours.stores)
    await theirs.load()
    await quarantine(ours.stores.objects, ours.stores.metadata, TENANT, CACHE_ID, cache.generation)
    await theirs.forget()
    assert theirs.kept() == set()


@pytest.mark.parametrize("lost", ["flushed", "another store", "lost directory"])
async def test_nothing_is_forgotten_unless_redis_belongs_to_the_store(
    processes: tuple[Process, Process], lost: str, tmp_path: Path
) -> None:
    ours, _ = processes
    await register(ours.stores)
    await build(ours.stores)
    await ours.load()
    metadata = ours.stores.metadata
    if lost == "flushed":
        await metadata.link.command("FLUSHALL")
    else:
        await metadata.delete_context(TENANT, "ctx_01")
        if lost == "another store":
            await metadata.bind_store("another")
        else:
            await ours.stores.objects.delete("store.json")
    await _forgets_nothing(ours, StoreMismatch)


async def test_nothing_is_forgotten_while_redis_is_away(
    processes: tuple[Process, Process], tmp_path: Path
) -> None:
    ours, _ = processes
    await register(ours.stores)
    await build(ours.stores)
    await ours.load()
    away = Metadata(RedisLink.open(f"unix://{tmp_path}/nothing.sock", 0.5), time.time)
    await _forgets_nothing(
        replace(ours, stores=replace(ours.stores, metadata=away)), MetadataUnavailable
    )
    await away.close()


async def _forgets_nothing(process: Process, error: type[StorageError]) -> None:
    before = process.kept()
    assert before
    with pytest.raises(error):
        await process.forget()
    assert process.kept() == before
    assert process.worker.dropped == []


async def test_without_a_disk_tier_memory_is_kept_in_step_all_the_same(
    stores: Stores, worker: ScriptedWorker
) -> None:
    await register(stores)
    worker.held = [(TENANT, CACHE_ID), (TENANT, "deleted"), ("other", CACHE_ID)]
    await forget_deleted(stores, worker)
    assert worker.dropped == [(TENANT, "deleted"), ("other", CACHE_ID)]
