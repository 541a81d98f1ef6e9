"""Everything that persists: opened from the settings, and handed down as one value."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import structlog

from kvkeep_service.config import Settings
from kvkeep_service.start_errors import SettingsInvalid
from kvkeep_service.valkey_watch import kept_alive
from kvkeep_storage.disk_tier import DiskTier
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import DataDirectoryLocked, Incompatible, Invalid, Unavailable
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

    Each is tried before this returns. What makes no directory comes first, so that a start which
    is refused leaves none.
    Raises: SettingsInvalid, naming the setting of what cannot be used; MetadataUnavailable, when
    a Valkey that was started ends again.
    """
    async with AsyncExitStack() as opened:
        embedded = EmbeddedStore(settings.data)
        metadata: Metadata | None = None
        objects: Objects | None = None
        if settings.redis_url is not None:
            with _named_by("KVKEEP_REDIS_URL"):
                metadata = await Metadata.connect(settings.redis_url)
            opened.push_async_callback(metadata.close)
        if settings.store is not None:
            with _named_by("KVKEEP_STORE"):
                objects = await open_objects(settings.store, settings.faults)
        if metadata is None:
            opened.push_async_callback(asyncio.to_thread, embedded.stop)
            with _named_by(_data_directory(settings)):
                await _started(embedded)
            metadata = await Metadata.connect(embedded.redis_url)
            opened.push_async_callback(metadata.close)
        if objects is None:
            with _named_by(_data_directory(settings)):
                objects = await open_objects(embedded.objects_url, settings.faults)
        if settings.redis_url is None:
            await opened.enter_async_context(kept_alive(embedded))
        disk = await opened.enter_async_context(_disk_tier(settings, objects))
        stores = Stores(metadata, objects, Leases(metadata), Jobs(metadata), settings.quotas, disk)
        if settings.redis_url is None:
            # The directory is ours alone: whoever held these is dead.
            await stores.leases.void_all()
            await stores.jobs.void_owners()
        yield stores


@contextmanager
def _named_by(setting: str) -> Iterator[None]:
    """Say which setting names what cannot be used. Raises: SettingsInvalid."""
    try:
        yield
    except (Invalid, DataDirectoryLocked) as error:
        raise SettingsInvalid([f"{setting}: {error.reason}"]) from error
    except (Unavailable, Incompatible) as error:
        raise SettingsInvalid([f"{setting}: {error}"]) from error


def _data_directory(settings: Settings) -> str:
    """Make the data directory, for this user alone, and return what messages call it.

    Raises: SettingsInvalid.
    """
    setting = f"KVKEEP_DATA = {str(settings.data)!r}"
    try:
        settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{setting}: cannot be made as a directory: {error.strerror}"
        raise SettingsInvalid([problem]) from error
    return setting


async def _started(embedded: EmbeddedStore) -> None:
    """Start it. A start that is given up goes on in its thread, so its end is waited for."""
    starting = asyncio.create_task(asyncio.to_thread(embedded.start))
    try:
        await asyncio.shield(starting)
    finally:
        await asyncio.wait([starting])


@asynccontextmanager
async def _disk_tier(settings: Settings, objects: Objects) -> AsyncIterator[DiskTier | None]:
    """None in front of a local store, which is as near. Raises: SettingsInvalid."""
    if not objects.is_remote or not settings.disk_cache_bytes:
        yield None
        return
    folder, setting = settings.disk_cache, f"KVKEEP_DISK_CACHE = {str(settings.disk_cache)!r}"
    if folder is None:
        folder, setting = settings.data / "disk-cache", _data_directory(settings)
    with _named_by(setting):
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
