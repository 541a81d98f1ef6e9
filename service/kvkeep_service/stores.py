"""Everything that persists: opened from the settings, and handed down as one value."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvkeep_service.config import Settings
from kvkeep_service.valkey_watch import kept_alive
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.leases import Leases
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.quotas import NO_QUOTAS, Quotas


@dataclass(frozen=True, slots=True)
class Stores:
    """Opened by the composition root and closed by it; with what each tenant may have in them."""

    metadata: Metadata
    objects: Objects
    leases: Leases
    jobs: Jobs
    quotas: Quotas = NO_QUOTAS


@asynccontextmanager
async def open_stores(settings: Settings) -> AsyncIterator[Stores]:
    """Open Redis and the object store, the embedded ones where no other is configured.

    Raises: DataDirectoryLocked, MetadataUnavailable, ObjectsUnavailable.
    """
    embedded: EmbeddedStore | None = None
    redis_url, store_url = settings.redis_url, settings.store
    if redis_url is None or store_url is None:
        embedded = EmbeddedStore(settings.data)
    if redis_url is None and embedded is not None:
        await asyncio.to_thread(embedded.start)
        redis_url = embedded.redis_url
    elif embedded is not None:
        (settings.data / "objects").mkdir(mode=0o700, parents=True, exist_ok=True)
    if store_url is None and embedded is not None:
        store_url = embedded.objects_url
    assert redis_url is not None
    assert store_url is not None
    try:
        metadata = await Metadata.connect(redis_url)
        try:
            stores = Stores(
                metadata,
                Objects.open(store_url),
                Leases(metadata),
                Jobs(metadata),
                settings.quotas,
            )
            if settings.redis_url is None:
                # The directory is ours alone: whoever held these is dead.
                await stores.leases.void_all()
                await stores.jobs.void_owners()
            async with kept_alive(embedded):
                yield stores
        finally:
            await metadata.close()
    finally:
        if embedded is not None:
            await asyncio.to_thread(embedded.stop)
