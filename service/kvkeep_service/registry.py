"""The use cases of contexts, without HTTP: register, look up, change, delete, ask.

Every call carries the tenant; a context of another tenant is as unknown as one that never was.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from kvkeep_service.errors import (
    ContextExpired,
    ContextFailed,
    ContextModelMismatch,
    ContextNotFound,
    ContextNotReady,
    InvalidRequest,
)
from kvkeep_service.ids import is_context_id
from kvkeep_service.lookup import Lookup
from kvkeep_service.ports import DocumentSpec, Span, Worker
from kvkeep_service.readiness import State, readiness
from kvkeep_service.rebuilding import rebuild
from kvkeep_service.registration import Answered, Registration, once, register
from kvkeep_service.removal import Remover
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import get_document, mirror_context, missing_document
from kvkeep_storage.errors import Gone, MetadataUnavailable, NotFound
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.metadata import Unset
from kvkeep_storage.records import UNFINISHED, ContextRecord, Expiry, Page

_log = structlog.get_logger(__name__)

_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Filter:
    """Which contexts to list: all that match, from the one after ``after``."""

    limit: int = 20
    after: str | None = None
    descending: bool = True
    status: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What to change of a context; UNSET leaves it, None removes it."""

    name: str | Unset | None
    metadata: Mapping[str, str] | Unset
    expires: Expiry | Unset | None


@dataclass(frozen=True, slots=True)
class Askable:
    """A ready context and the stored ratio that one query was admitted at."""

    cache_id: str
    ratio: float


class Registry:
    """Contexts of all tenants. Every method raises MetadataUnavailable or ObjectsUnavailable."""

    def __init__(
        self,
        stores: Stores,
        worker: Worker,
        *,
        default_ttl_seconds: int | None = None,
        stale_seconds: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``default_ttl_seconds`` is for registrations that say nothing; None is never.

        ``stale_seconds`` is how long after it was read a record may answer questions while
        Redis is away.
        """
        self._stores = stores
        self._lookup = Lookup(stores, stale_seconds)
        self._worker = worker
        self._remover = Remover(stores, worker)
        self._clock = clock
        self.default_expiry = (
            None if default_ttl_seconds is None else Expiry("created_at", default_ttl_seconds)
        )

    async def register(self, tenant: str, wanted: Registration) -> ContextRecord:
        """Register a document; see `registration.register` for what it leaves and raises."""
        return await register(
            self._stores, self._worker, self._remover, tenant, wanted, self._clock()
        )

    async def once(
        self, tenant: str, key: str | None, body: bytes, answer: Callable[[], Awaitable[Answered]]
    ) -> Answered:
        """Answer a request once per idempotency key; see `registration.once`."""
        return await once(self._stores.metadata, tenant, key, body, answer)

    async def context(self, tenant: str, context_id: str) -> ContextRecord:
        """Look up a context.

        Raises: ContextNotFound; ContextExpired, until it is swept; RecordsForeign.
        """
        if not is_context_id(context_id):
            raise ContextNotFound(context_id)
        record = await self._lookup.context(tenant, context_id)
        if record is None:
            raise ContextNotFound(context_id)
        if record.status == "expired":
            raise _expired(record.id, record.expires_at)
        return record

    async def contexts(self, tenant: str, wanted: Filter) -> Page:
        """List contexts, expired ones that are not swept yet included.

        Raises: RecordsForeign, rather than to show a list without what Redis has lost.
        """
        page = await self._stores.metadata.contexts(
            tenant,
            limit=wanted.limit,
            after=wanted.after,
            descending=wanted.descending,
            status=wanted.status,
            metadata=wanted.metadata or {},
        )
        await self._lookup.check_binding()
        return page

    async def document(self, tenant: str, context_id: str) -> DocumentSpec:
        """Read a document back.

        Raises: ContextNotFound, also once its deletion has begun; ContextExpired;
            DocumentCorrupt; StoreMismatch, MetadataUnavailable, ObjectsUnavailable.
        """
        record = await self.context(tenant, context_id)
        key = DocumentKey(tenant, record.id)
        try:
            body = await get_document(self._stores.objects, key)
        except NotFound as error:
            missing = await missing_document(self._stores.objects, self._stores.metadata, key)
            if isinstance(missing, NotFound):
                raise ContextNotFound(context_id) from error
            raise missing from error
        spans = tuple(Span(start, end) for start, end in body.protect)
        return DocumentSpec(body.text, body.system, body.instructions, spans)

    async def change(self, tenant: str, context_id: str, changes: Changes) -> ContextRecord:
        """Change name, metadata or expiry, and mirror it. May be repeated.

        Raises: ContextNotFound, ContextExpired; StoreMismatch for a Redis flushed meanwhile.
        """
        if not is_context_id(context_id):
            raise ContextNotFound(context_id)
        self._lookup.changed(tenant, context_id)
        try:
            record = await self._stores.metadata.patch_context(
                tenant,
                context_id,
                name=changes.name,
                metadata=changes.metadata,
                expires=changes.expires,
            )
        except NotFound as error:
            await self._lookup.check_binding()
            raise ContextNotFound(context_id) from error
        except Gone as error:
            raise _expired(context_id, error.expired_at) from error
        finally:
            # A look-up in between may have seen it as it was before.
            self._lookup.changed(tenant, context_id)
        key = DocumentKey(tenant, record.id)
        await mirror_context(self._stores.objects, self._stores.metadata, key)
        return record

    async def delete(self, tenant: str, context_id: str) -> None:
        """Delete a context; one that is not there counts as deleted.

        Raises: ContextNotFound for what cannot be an id at all.
        """
        if not is_context_id(context_id):
            raise ContextNotFound(context_id)
        self._lookup.deleted(tenant, context_id)
        await self._remover.remove_context(tenant, context_id)

    async def repeat_deletions(self) -> None:
        """Delete again what Redis has back; see `removal.Remover.repeat_undone`."""
        await self._remover.repeat_undone()

    async def rebuild(self, tenant: str, context_id: str) -> ContextRecord:
        """Build a context again; see `rebuilding.rebuild` for what that means and raises.

        Raises: ContextNotFound, ContextExpired.
        """
        record = await self.context(tenant, context_id)
        try:
            return await rebuild(self._stores, self._worker, record)
        except Gone as error:
            raise _expired(context_id, error.expired_at) from error

    async def finished(self, tenant: str, context_id: str, seconds: float) -> ContextRecord:
        """Wait until a context is ready or failed, at most so long, and return it as it is then.

        Raises: ContextNotFound, ContextExpired, also when that happens meanwhile.
        """
        deadline = time.monotonic() + seconds
        while True:
            record = await self.context(tenant, context_id)
            left = deadline - time.monotonic()
            if record.status not in UNFINISHED or left <= 0:
                return record
            await asyncio.sleep(min(_POLL_SECONDS, left))

    async def until_askable(self, tenant: str, context_id: str, seconds: float) -> None:
        """Wait as ``finished`` does; while Redis is away, ``open_query`` says what goes on.

        Raises: ContextNotFound, ContextExpired, RecordsForeign.
        """
        with suppress(MetadataUnavailable):
            await self.finished(tenant, context_id, seconds)

    async def open_query(
        self,
        tenant: str,
        context_id: str,
        ratio: float | None,
        min_ratio: float | None = None,
    ) -> Askable:
        """Admit one query at a stored ratio, and count it as a use of the context.

        With ``min_ratio``, a stored one that is not above it, less may be served. While Redis
        is away, a record seen a short time ago will do, and the use is not counted.
        Raises: ContextNotFound, ContextExpired, ContextModelMismatch, ContextNotReady,
            ContextFailed; InvalidRequest for a ratio it does not offer; RecordsForeign.
        """
        record, is_current = await self._answerable(tenant, context_id)
        self._require_ready(record)
        asked = record.ratio if ratio is None else ratio
        if ratio is not None:
            _check_offered("ratio", ratio, record)
        if min_ratio is not None:
            _check_offered("min_ratio", min_ratio, record)
            if min_ratio > asked:
                raise InvalidRequest("min_ratio", f"{min_ratio} is above the ratio, {asked}")
        if is_current and not await self._touched(tenant, context_id):
            # Deleted or expired since: looking again says which.
            await self.context(tenant, context_id)
            raise ContextNotFound(context_id)
        return Askable(record.cache_id, asked)

    async def prefetch(self, tenant: str, context_id: str) -> ContextRecord:
        """Have the cache of a context loaded, at the ratio its questions are read at.

        This is no use of the context. Raises: as ``open_query``; Overloaded.
        """
        record, _ = await self._answerable(tenant, context_id)
        self._require_ready(record)
        await self._worker.prefetch(tenant, record.cache_id, record.ratio)
        return record

    def _require_ready(self, record: ContextRecord) -> None:
        served = self._worker.model.name
        if record.model != served:
            raise ContextModelMismatch(record.id, record.model, served)
        if record.status == "failed":
            raise ContextFailed(
                record.id, record.error_code or "internal", record.error_detail or ""
            )
        if record.status != "ready":
            raise ContextNotReady(record.id, record.status)

    async def _answerable(self, tenant: str, context_id: str) -> tuple[ContextRecord, bool]:
        """The record to answer by, and whether Redis has just said so."""
        if not is_context_id(context_id):
            raise ContextNotFound(context_id)
        found = await self._lookup.answerable(tenant, context_id)
        if found is None:
            raise ContextNotFound(context_id)
        record = found.record
        # The status in a record that was seen earlier knows nothing of the time since.
        is_over = record.expires_at is not None and record.expires_at <= self._clock()
        if record.status == "expired" or (is_over and not found.is_current):
            raise _expired(record.id, record.expires_at)
        return record, found.is_current

    async def _touched(self, tenant: str, context_id: str) -> bool:
        """Count a use; False when there is no such context any more.

        A Redis that answers reads and refuses writes (its disk is full) costs a count, no answer.
        """
        try:
            return await self._stores.metadata.touch_context(tenant, context_id, self._clock())
        except MetadataUnavailable as error:
            _log.warning("use_not_counted", context=context_id, code=error.code)
            return True

    async def health(self) -> Mapping[str, State]:
        """Ask everything a request needs; see `readiness.readiness`."""
        return await readiness(self._stores, self._worker)

    async def close(self) -> None:
        """Stop what runs behind requests. Modifies: this object, which is of no use then."""
        await self._remover.close()


def _check_offered(field: str, ratio: float, record: ContextRecord) -> None:
    if ratio not in record.ratios_available:
        # Its cache may hold more, for a context that asked for more.
        offered = ", ".join(str(available) for available in record.ratios_available)
        raise InvalidRequest(field, f"{ratio} is not offered by this context; {offered} are")


def _expired(context_id: str, expired_at: float | None) -> ContextExpired:
    moment = datetime.fromtimestamp(expired_at or 0.0, UTC)
    return ContextExpired(context_id, moment.isoformat(timespec="milliseconds")[:-6] + "Z")
