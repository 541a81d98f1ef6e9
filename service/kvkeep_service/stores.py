"""Everything that persists: opened from the settings, and handed down as one value."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from kvkeep_service.config import Settings
from kvkeep_service.valkey_watch import kept_alive
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.faults import Faults
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.quotas import NO_QUOTAS, Quotas
from kvkeep_storage.sources import ObjectSource, Source
from kvkeep_storage.spare_memory import SpareMemory

_log = structlog.get_logger(__name__)

# Whoever starts the server knows within ten seconds what is wrong with its store.
_CHECK_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Stores:
    """Opened by the composition root and closed by it; with what each tenant may have in them."""

    metadata: Metadata
    objects: Objects
    leases: Leases
    jobs: Jobs
    quotas: Quotas = NO_QUOTAS
    disk: DiskTier | None = None
    memory: SpareMemory = field(default_factory=SpareMemory)

    @property
    def source(self) -> Source:
        """Where caches are loaded from: through the disk tier where there is one."""
        return ObjectSource(self.objects) if self.disk is None else self.disk


@asynccontextmanager
async def open_stores(settings: Settings) -> AsyncIterator[Stores]:
    """Open Redis and the object store, the embedded ones where no other is configured.

    Either is tried before this returns. Raises: DataDirectoryLocked, MetadataUnavailable,
    ObjectsUnavailable.
    """
    embedded: EmbeddedStore | None = None
    redis_url, store_url = settings.redis_url, settings.store
    if redis_url is None or store_url is None:
        embedded = EmbeddedStore(settings.data)
    try:
        if redis_url is None and embedded is not None:
            await _started(embedded)
            redis_url = embedded.redis_url
        elif embedded is not None:
            (settings.data / "objects").mkdir(mode=0o700, parents=True, exist_ok=True)
        if store_url is None and embedded is not None:
            store_url = embedded.objects_url
        assert redis_url is not None
        assert store_url is not None
        metadata = await Metadata.connect(redis_url)
        try:
            objects = await open_objects(store_url, settings.faults)
            async with kept_alive(embedded), _disk_tier(settings, objects) as disk:
                stores = Stores(
                    metadata, objects, Leases(metadata), Jobs(metadata), settings.quotas, disk
                )
                if settings.redis_url is None:
                    # The directory is ours alone: whoever held these is dead.
                    await stores.leases.void_all()
                    await stores.jobs.void_owners()
                yield stores
        finally:
            await metadata.close()
    finally:
        if embedded is not None:
            await asyncio.to_thread(embedded.stop)


async def _started(embedded: EmbeddedStore) -> None:
    """Start it. A start that is given up goes on in its thread, so its end is waited for."""
    starting = asyncio.create_task(asyncio.to_thread(embedded.start))
    try:
        await asyncio.shield(starting)
    finally:
        await asyncio.wait([starting])


@asynccontextmanager
async def _disk_tier(settings: Settings, objects: Objects) -> AsyncIterator[DiskTier | None]:
    """None in front of a local store, which is as near. Raises: Invalid, for its directory."""
    if not objects.is_remote or not settings.disk_cache_bytes:
        yield None
        return
    folder = settings.disk_cache or settings.data / "disk-cache"
    disk = await asyncio.to_thread(DiskTier.open, objects, folder, settings.disk_cache_bytes)
    try:
        yield disk
    finally:
        await disk.close()


async def open_objects(url: str, faults: str | None) -> Objects:
    """Open the object store, and try it: what it cannot do is told within seconds.

    Raises: ObjectsUnavailable, in one line.
    """
    objects = Objects.open(url)
    # Without faults: the same seed meets the same ones at every start, and might never pass.
    await objects.check(deadline_seconds=_CHECK_SECONDS)
    if faults is None:
        return objects
    _log.warning(
        "faults_injected", faults=faults, advice="unset KVKEEP_FAULTS wherever answers count"
    )
    return Objects.open(url, faults=Faults.parse(faults))
