"""Documents that no context record knows, left by a process that died between two writes.

A registration stores the document first and writes the record then; a deletion removes document
and mirror first. So a file that has no partner and no record is a leftover of one of them. Both
files without a record are a context that a reindex brings back, and are not touched. Nothing
here runs by itself: documents cannot be made again, so an operator asks for it.
"""

import time
from dataclasses import dataclass

from kvkeep_storage.binding import require_bound
from kvkeep_storage.documents import delete_document
from kvkeep_storage.errors import RecordCorrupt
from kvkeep_storage.inventory import Stored, stored_documents
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects


@dataclass(frozen=True, slots=True)
class LoneDocument:
    """A leftover: where it lies, and its bytes."""

    key: DocumentKey
    size_bytes: int


async def lone_documents(
    objects: Objects, metadata: Metadata, *, grace_seconds: float
) -> list[LoneDocument]:
    """Find leftovers whose last write lies the grace period back. Modifies nothing.

    Raises: StoreMismatch when Redis and the object store do not belong together, because every
    document would look like one then; ObjectsUnavailable, MetadataUnavailable.
    """
    await require_bound(objects, metadata)
    stored = await stored_documents(objects)
    before = time.time() - grace_seconds
    old = [
        key for key in stored if stored[key].newest_at <= before and _is_single(key, stored[key])
    ]
    found = [
        LoneDocument(key, stored[key].size_bytes)
        for key in old
        if not await _has_record(metadata, key)
    ]
    await require_bound(objects, metadata)
    return found


async def delete_lone_document(objects: Objects, metadata: Metadata, key: DocumentKey) -> bool:
    """Delete one that ``lone_documents`` has found; False when it has a record by now.

    Raises: StoreMismatch, ObjectsUnavailable, MetadataUnavailable.
    """
    if await _has_record(metadata, key):
        return False
    await require_bound(objects, metadata)
    await delete_document(objects, key)
    return True


def _is_single(key: DocumentKey, stored: Stored) -> bool:
    return stored.has(key.body) != stored.has(key.mirror)


async def _has_record(metadata: Metadata, key: DocumentKey) -> bool:
    try:
        return await metadata.context(key.tenant, key.context_id) is not None
    except RecordCorrupt:
        return True
