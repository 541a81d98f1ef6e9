"""Contexts that a deletion has left half-way when its process died: a record and nothing else.

A registration stores the document before the record, and only a deletion removes a mirror. So a
record of which neither document nor mirror is there is one that a deletion did not get to any
more, or that a reindex beside a deletion has brought back. Such a context can never be built. One
that is ready goes on answering from its cache, and is left to whoever deletes it again; the others
are of no use to anybody. Nothing here runs by itself: an operator asks for it.
"""

from collections.abc import Sequence

from kvkeep_storage.binding import require_bound
from kvkeep_storage.errors import NotFound
from kvkeep_storage.hash_fields import hash_fields
from kvkeep_storage.inventory import stored_documents
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import UNFINISHED
from kvkeep_storage.redis_keys import TenantKeys


async def half_deleted(objects: Objects, metadata: Metadata) -> list[DocumentKey]:
    """Find them. Modifies nothing.

    A deletion that is under way may be among them: ending it as well is harmless.
    Raises: StoreMismatch when Redis and the object store do not belong together, because every
    record would look like one then; ObjectsUnavailable, MetadataUnavailable.
    """
    await require_bound(objects, metadata)
    # Records first: what is registered after that cannot look like one.
    useless = [
        DocumentKey(tenant, context_id)
        for tenant in await metadata.tenants()
        for context_id in await _useless(metadata, tenant, await metadata.context_ids(tenant))
    ]
    stored = await stored_documents(objects) if useless else {}
    found = [key for key in useless if key not in stored]
    await require_bound(objects, metadata)
    return found


async def end_deletion(objects: Objects, metadata: Metadata, key: DocumentKey) -> bool:
    """Delete the record of one that ``half_deleted`` has found; False when it is none by now.

    What it leaves of a cache is the sweeper's.
    Raises: StoreMismatch, ObjectsUnavailable, MetadataUnavailable.
    """
    if not await _useless(metadata, key.tenant, [key.context_id]):
        return False
    await require_bound(objects, metadata)
    for name in (key.body, key.mirror):
        try:
            await objects.size(name)
        except NotFound:
            continue
        return False
    await metadata.delete_context(key.tenant, key.context_id)
    return True


async def _useless(metadata: Metadata, tenant: str, context_ids: Sequence[str]) -> list[str]:
    """Those that no question can be answered from until they are built."""
    keys = [TenantKeys(tenant).context(context_id) for context_id in context_ids]
    statuses = await hash_fields(metadata.link, keys, "status")
    return [
        context_id
        for context_id, (status,) in zip(context_ids, statuses, strict=True)
        if status in UNFINISHED or status == "failed"
    ]
