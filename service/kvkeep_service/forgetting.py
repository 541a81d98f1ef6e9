"""Letting go of what was deleted by whichever process: out of memory, and off the disk tier."""

from collections import defaultdict

import structlog

from kvkeep_service.ports import Worker
from kvkeep_service.stores import Stores
from kvkeep_storage.binding import require_bound
from kvkeep_storage.keys import GenerationKey
from kvkeep_storage.standing import Standing, standings

_log = structlog.get_logger(__name__)


async def forget_deleted(stores: Stores, worker: Worker) -> None:
    """Drop every cache in memory that no context refers to, and every copy that no record names.

    What is held is listed before the records are read, so that nothing which is committed and
    loaded meanwhile looks deleted. A cache in memory was verified when it came, and is as good
    as any later generation of it; so it stays for as long as a context wants it.
    Modifies: the worker's memory and the disk tier, never the object store.
    Raises: StoreMismatch when Redis does not belong to the object store, and MetadataUnavailable,
    ObjectsUnavailable: nothing is dropped then.
    """
    resident = worker.resident()
    copies = [] if stores.disk is None else await stores.disk.generations()
    found = await _standings(stores, resident, copies)
    unwanted = [held for held in resident if not found[held].is_referenced]
    unnamed = [
        key for key in copies if found[key.tenant, key.cache_id].generation != key.generation
    ]
    if not unwanted and not unnamed:
        return
    # A flushed or foreign Redis names nothing, and that means nothing.
    await require_bound(stores.objects, stores.metadata)
    for tenant, cache_id in unwanted:
        await worker.drop(tenant, cache_id)
    for key in unnamed:
        assert stores.disk is not None, "copies were found on it"
        await stores.disk.drop(key)
    _log.info("deleted_elsewhere", caches=len(unwanted), copies=len(unnamed))


async def forget_conversations(stores: Stores, worker: Worker) -> None:
    """Give up what continues answers about contexts that were deleted, or have expired.

    Modifies: the worker's memory. Raises: as ``forget_deleted``.
    """
    for tenant, context_id in worker.conversations():
        record = await stores.metadata.context(tenant, context_id)
        if record is None:
            # As above.
            await require_bound(stores.objects, stores.metadata)
        if record is None or record.status == "expired":
            await worker.forget(tenant, context_id)


async def _standings(
    stores: Stores, resident: list[tuple[str, str]], copies: list[GenerationKey]
) -> dict[tuple[str, str], Standing]:
    asked = defaultdict(set)
    for tenant, cache_id in [*resident, *((key.tenant, key.cache_id) for key in copies)]:
        asked[tenant].add(cache_id)
    found = {}
    for tenant, cache_ids in asked.items():
        for cache_id, standing in (await standings(stores.metadata, tenant, cache_ids)).items():
            found[tenant, cache_id] = standing
    return found
