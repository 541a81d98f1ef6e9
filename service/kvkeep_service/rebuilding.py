"""Building the cache of a context again because somebody asks for it."""

from kvkeep_service.errors import ContextModelMismatch, ContextNotFound
from kvkeep_service.ports import Worker
from kvkeep_service.registration import quota_exceeded
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import get_document, mirror_context
from kvkeep_storage.errors import NotFound, QuotaExceeded
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import ContextRecord


async def rebuild(stores: Stores, worker: Worker, record: ContextRecord) -> ContextRecord:
    """Queue a new build of a context, and return its record as it is then.

    A failed context waits for its build again. A ready one answers from the generation it has
    until a fresh one is committed, and keeps it when that build fails. One that waits already
    is left as it is. A crash leaves a record without a job, which reconciling mends.
    Raises: ContextModelMismatch, QuotaExceeded; ContextNotFound when it is deleted meanwhile;
        Gone; DocumentCorrupt, when there is nothing to build it from; MetadataUnavailable,
        ObjectsUnavailable.
    """
    served = worker.model.name
    if record.model != served:
        raise ContextModelMismatch(record.id, record.model, served)
    key = DocumentKey(record.tenant, record.id)
    try:
        await get_document(stores.objects, key)
        waiting = await stores.metadata.rebuild_context(record.tenant, record.id, stores.quotas)
    except NotFound as error:
        raise ContextNotFound(record.id) from error
    except QuotaExceeded as error:
        raise quota_exceeded(error) from error
    await mirror_context(stores.objects, stores.metadata, key)
    if not record.awaits_build:
        await stores.jobs.enqueue(record.tenant, record.id)
    return waiting
