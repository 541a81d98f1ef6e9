"""Whether Redis and the object store belong together.

Both hold the store's id. When they differ, or Redis has none (flushed, wrong URL, lost
directory), what one says about the other means nothing: nothing may be deleted because of it.
"""

from kvkeep_storage import keys
from kvkeep_storage.errors import Corrupt, StoreMismatch
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects


async def require_bound(objects: Objects, metadata: Metadata) -> str:
    """Return the store id that both sides hold. Modifies nothing.

    Raises: StoreMismatch when they do not, or ``store.json`` cannot be read as one;
    ObjectsUnavailable, MetadataUnavailable.
    """
    recorded = await metadata.store_id()
    try:
        stored = await objects.find_store_id()
    except Corrupt as error:
        raise StoreMismatch(None, recorded) from error
    if stored is None or stored != recorded:
        raise StoreMismatch(stored, recorded)
    return stored


async def bind_if_new(objects: Objects, metadata: Metadata) -> None:
    """Bind an object store without documents and caches to a Redis that is bound to none.

    To be called at every start; does nothing when both belong together already.
    Raises: StoreMismatch when they do not, and only a reindex or another URL can help; Full,
    Corrupt, ObjectsUnavailable, MetadataUnavailable.
    """
    recorded = await metadata.store_id()
    if recorded is None and await _is_empty(objects):
        await metadata.bind_store(await objects.store_id())
        return
    await require_bound(objects, metadata)


async def _is_empty(objects: Objects) -> bool:
    for directory in (keys.DOCUMENTS, keys.CACHES):
        if await objects.directories_below(directory):
            return False
    return True
