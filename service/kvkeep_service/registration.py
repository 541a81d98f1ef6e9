"""Registering a document: nothing of it is left when it fails, everything when it returns."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

import structlog

from kvkeep_service.errors import (
    IdempotencyInFlight,
    IdempotencyMismatch,
    ModelNotFound,
    QuotaExceeded,
)
from kvkeep_service.ids import new_context_id
from kvkeep_service.known_ratio import ratio_by
from kvkeep_service.ports import CompressionSpec, DocumentSpec, Prepared, Worker
from kvkeep_service.removal import Remover
from kvkeep_service.stores import Stores
from kvkeep_storage import errors as storage
from kvkeep_storage.documents import DocumentBody, mirror_context, put_document
from kvkeep_storage.errors import StorageError
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import InFlight, Metadata, Mismatch, Replay
from kvkeep_storage.records import ContextRecord, Expiry

_log = structlog.get_logger(__name__)

KEEP_ANSWERS_SECONDS: Final = 24 * 3600
# A place in the queue comes free by itself; for the rest somebody has to delete.
_QUEUED_RETRY_SECONDS: Final = 5
_QUOTA_RETRY_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Registration:
    """What a user wants registered; ``model`` None is the served one."""

    document: DocumentSpec
    compression: CompressionSpec
    name: str | None
    metadata: Mapping[str, str]
    model: str | None
    expires: Expiry | None


@dataclass(frozen=True, slots=True)
class Answered:
    """A response as it was sent, to be sent again under the same idempotency key."""

    status: int
    body: bytes
    headers: Mapping[str, str]


async def register(
    stores: Stores, worker: Worker, remover: Remover, tenant: str, wanted: Registration, now: float
) -> ContextRecord:
    """Store a document and its record; ready at once when an equal cache is committed.

    Otherwise its build is queued. A crash leaves at most a document without a record, or a
    queued record without a job, which reconciling mends; an error leaves nothing.
    Raises: ModelNotFound, DocumentTooLong, InvalidRequest, QuotaExceeded; StoreMismatch for a
        Redis flushed meanwhile; Full, MetadataUnavailable, ObjectsUnavailable.
    """
    served = worker.model.name
    if wanted.model not in (None, served):
        raise ModelNotFound(str(wanted.model), served)
    prepared = await worker.prepare(tenant, wanted.document, wanted.compression)
    record = _record(tenant, served, wanted, prepared, now)
    if prepared.candidates:
        record = await _with_known_ratio(stores, record, prepared)
    key = DocumentKey(tenant, record.id)
    try:
        # Before anything is written; creating the record compares them again.
        await stores.metadata.check_quotas(record, stores.quotas)
        await put_document(stores.objects, key, _body(wanted, prepared))
        await stores.metadata.create_context(record, stores.quotas)
        # Before it can be ready: builds mirror what waits for one, and nobody else looks again.
        await mirror_context(stores.objects, stores.metadata, key)
        ready = await stores.metadata.attach(tenant, record.id, now)
        if ready is None:
            await stores.jobs.enqueue(tenant, record.id)
        else:
            await mirror_context(stores.objects, stores.metadata, key)
    except storage.QuotaExceeded as error:
        await remover.undo_registration(tenant, record.id)
        raise quota_exceeded(error) from error
    except BaseException:
        # Cancellation too: whoever asked will never learn the id.
        await remover.undo_registration(tenant, record.id)
        raise
    return record if ready is None else ready


async def once(
    metadata: Metadata,
    tenant: str,
    key: str | None,
    body: bytes,
    answer: Callable[[], Awaitable[Answered]],
) -> Answered:
    """Answer a request once per idempotency key; the same key and body replay the answer.

    A request that fails frees its key. Without a key, every request is answered anew.
    Raises: IdempotencyMismatch, IdempotencyInFlight, MetadataUnavailable; what ``answer`` does.
    """
    if key is None:
        return await answer()
    digest = sha256(body).hexdigest()
    match await metadata.idempotency_begin(tenant, key, digest, KEEP_ANSWERS_SECONDS):
        case Replay(status, kept, headers):
            return Answered(status, kept, headers)
        case Mismatch():
            raise IdempotencyMismatch
        case InFlight():
            raise IdempotencyInFlight
    try:
        answered = await answer()
    except BaseException:
        await _quietly(metadata.idempotency_abandon(tenant, key), "idempotency_key_held")
        raise
    # The work is done: a key that cannot be kept must not turn it into a failure.
    finish = metadata.idempotency_finish(
        tenant, key, answered.status, answered.body, answered.headers
    )
    await _quietly(finish, "idempotency_answer_lost")
    return answered


def quota_exceeded(error: storage.QuotaExceeded) -> QuotaExceeded:
    """What a tenant is told; the numbers are its own."""
    seconds = _QUEUED_RETRY_SECONDS if error.quota == "queued" else _QUOTA_RETRY_SECONDS
    return QuotaExceeded(error.quota, error.limit, error.used, error.asked, seconds)


async def _quietly(work: Awaitable[object], complaint: str) -> None:
    """Do what must not hide the error that is under way; say so when it fails."""
    try:
        await work
    except StorageError as error:
        _log.warning(complaint, code=error.code)


async def _with_known_ratio(
    stores: Stores, record: ContextRecord, prepared: Prepared
) -> ContextRecord:
    """The record with its ratio, when what is committed already decides it."""
    committed = await stores.metadata.cache(record.tenant, record.cache_id)
    ratio = ratio_by(committed, record, prepared.candidates)
    return record if ratio is None else replace(record, ratio=ratio, ratio_from=None)


def _record(
    tenant: str, model: str, wanted: Registration, prepared: Prepared, now: float
) -> ContextRecord:
    expires = wanted.expires
    return ContextRecord(
        tenant=tenant,
        id=new_context_id(),
        cache_id=prepared.fingerprint.digest,
        model=model,
        status="queued",
        created_at=now,
        tokens_document=prepared.document_tokens,
        tokens_protected=prepared.protected_tokens,
        tokens_total=prepared.total_tokens,
        policy=wanted.compression.policy,
        policy_applied=prepared.policy_applied,
        ratio=prepared.ratio,
        tokens_asked=wanted.compression.tokens,
        max_loss=wanted.compression.max_loss,
        ratio_from=prepared.candidates[0] if prepared.candidates else None,
        scoring=wanted.compression.scoring,
        quantization=wanted.compression.quantization,
        remainder=prepared.remainder,
        full_bytes=prepared.full_bytes,
        name=wanted.name,
        metadata=wanted.metadata,
        expires_at=None if expires is None else expires.at(now, None),
        expires_anchor=None if expires is None else expires.anchor,
        expires_seconds=None if expires is None else expires.seconds,
        timings={},
    )


def _body(wanted: Registration, prepared: Prepared) -> DocumentBody:
    document = wanted.document
    return DocumentBody(
        text=document.text,
        system=document.system,
        instructions=document.instructions,
        protect=tuple((span.start, span.end) for span in document.protect),
        prefix_text=prepared.prefix_text,
        policy=wanted.compression.policy,
        ratio=prepared.ratio,
        scoring=wanted.compression.scoring,
        quantization=wanted.compression.quantization,
        normalization=wanted.compression.normalization,
        neighbours=wanted.compression.neighbours,
        remainder=wanted.compression.remainder,
        max_loss=wanted.compression.max_loss,
        ratio_from=prepared.candidates[0] if prepared.candidates else None,
    )
