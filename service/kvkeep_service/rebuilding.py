"""Building the cache of a context again because somebody asks for it."""

from kvkeep_service.errors import (
    BuildMismatch,
    ContextModelMismatch,
    ContextNotFound,
    HeadScoresMissing,
)
from kvkeep_service.mismatch import mismatch
from kvkeep_service.ports import Worker
from kvkeep_service.registration import quota_exceeded
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import mirror_context, missing_document
from kvkeep_storage.errors import NotFound, QuotaExceeded
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.records import ContextRecord


async def rebuild(stores: Stores, worker: Worker, record: ContextRecord) -> ContextRecord:
    """Queue a new build of a context, and return its record as it is then.

    A failed context waits for its build again. A ready one answers from the generation it has
    until a fresh one is committed, and keeps it when that build fails. One that waits already
    is left as it is. A crash leaves a record without a job, which reconciling mends.
    Raises: ContextModelMismatch; BuildMismatch, when a build here would make another cache, and
        whatever else planning it raises; QuotaExceeded; ContextNotFound when it is deleted
        meanwhile, or its deletion was begun; Gone; DocumentCorrupt, when there is nothing to
        build it from; StoreMismatch, MetadataUnavailable, ObjectsUnavailable.
    """
    served = worker.model.name
    if record.model != served:
        raise ContextModelMismatch(record.id, record.model, served)
    key = DocumentKey(record.tenant, record.id)
    try:
        await _check_promise(stores, worker, record)
    except NotFound as error:
        missing = await missing_document(stores.objects, stores.metadata, key)
        if isinstance(missing, NotFound):
            raise ContextNotFound(record.id) from error
        raise missing from error
    try:
        waiting = await stores.metadata.rebuild_context(record.tenant, record.id, stores.quotas)
    except NotFound as error:
        raise ContextNotFound(record.id) from error
    except QuotaExceeded as error:
        raise quota_exceeded(error) from error
    await mirror_context(stores.objects, stores.metadata, key)
    if not record.awaits_build:
        await stores.jobs.enqueue(record.tenant, record.id)
    return waiting


async def _check_promise(stores: Stores, worker: Worker, record: ContextRecord) -> None:
    """Whether a build here would make the cache that was promised, and not wait for ever.

    Raises: BuildMismatch, saying how many others might; as ``Worker.planned``.
    """
    try:
        planned = await worker.planned(record.tenant, record.id)
        if planned.digest == record.cache_id:
            return
        why = await mismatch(stores, record, planned)
    except HeadScoresMissing:
        why = await mismatch(stores, record, None)
    except BuildMismatch as error:
        why = error
    others = max(0, await stores.jobs.num_builders() - 1)
    raise BuildMismatch(f"{why.detail}; {_whom_to_ask(others)}", others)


def _whom_to_ask(others: int) -> str:
    if not others:
        return "no other server takes builds"
    return f"{others} other server(s) take builds: ask the one that can build it"
