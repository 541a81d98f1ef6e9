"""Reading back everything that is stored, and comparing it with the records.

Every document and mirror, and every digest of every committed cache, by the same code that
serves them. Runs beside servers: what changes while it is looked at is looked at again. Nothing
is repaired while Redis and the object store do not belong together.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvkeep_storage.binding import require_bound
from kvkeep_storage.concurrency import run_together
from kvkeep_storage.documents import get_document, get_mirror, mirror_context
from kvkeep_storage.errors import Corrupt, Incompatible, NotFound, RecordCorrupt
from kvkeep_storage.inventory import stored_documents
from kvkeep_storage.jobs import Jobs
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.leases import Leases
from kvkeep_storage.load import load, quarantine
from kvkeep_storage.metadata import Metadata
from kvkeep_storage.objects import Objects
from kvkeep_storage.records import ContextRecord
from kvkeep_storage.sources import ObjectSource

What = Literal["document", "mirror", "record", "cache"]

_MISSING: Final = "it is missing"
_NO_RECORD: Final = "there is none: a reindex or a gc is needed"
_REBUILT: Final = "taken out of service, to be built again"
_REWRITTEN: Final = "written again from its record"
# Longer than the steps of a registration or a deletion are apart.
_SETTLE_SECONDS: Final = 0.3
_CONTEXTS_AT_ONCE: Final = 64
_PARALLEL_CONTEXTS: Final = 8


@dataclass(frozen=True, slots=True)
class Checked:
    """One thing that was read: what it is and which one, what is wrong, and what was done."""

    what: What
    name: str
    problem: str | None = None
    repair: str | None = None


class Verifier:
    """Checks one object store and its records; with ``repairs``, mends what it can.

    A cache whose bytes are proven wrong is quarantined, and its contexts are queued to be built
    again; a mirror that is damaged, missing or behind is written again. A damaged document or
    record can only be told.
    """

    def __init__(
        self, objects: Objects, metadata: Metadata, leases: Leases, jobs: Jobs, *, repairs: bool
    ) -> None:
        """Keep the stores, which the caller closes."""
        self._objects = objects
        self._metadata = metadata
        self._leases = leases
        self._jobs = jobs
        self._repairs = repairs

    async def run(self) -> AsyncIterator[Checked]:
        """Yield everything as it is checked; a cache takes its size in memory meanwhile.

        Raises: StoreMismatch before anything is read; ObjectsUnavailable, MetadataUnavailable:
        what was yielded before holds, and it may be run again.
        """
        await require_bound(self._objects, self._metadata)
        recorded = {
            DocumentKey(tenant, context_id)
            for tenant in await self._metadata.tenants()
            for context_id in await self._metadata.context_ids(tenant)
        }
        stored = set(await stored_documents(self._objects))
        keys = sorted(recorded | stored, key=lambda key: key.body)
        for first in range(0, len(keys), _CONTEXTS_AT_ONCE):
            some = keys[first : first + _CONTEXTS_AT_ONCE]
            for found in await run_together(
                (self._context(key) for key in some), limit=_PARALLEL_CONTEXTS
            ):
                for checked in found:
                    yield checked
        for tenant in await self._metadata.tenants():
            for cache_id, generation in sorted(await self._metadata.live_generations(tenant)):
                yield await self._cache(tenant, cache_id, generation)

    async def _context(self, key: DocumentKey) -> list[Checked]:
        found = await self._look(key)
        if found.has_problem:
            # It may be in the midst of being registered, changed or deleted.
            await asyncio.sleep(_SETTLE_SECONDS)
            found = await self._look(key)
        if found.is_gone:
            return []
        repair = None
        if self._repairs and found.may_mirror:
            await require_bound(self._objects, self._metadata)
            await mirror_context(self._objects, self._metadata, key)
            repair = _REWRITTEN
        name = f"{key.tenant}/{key.context_id}"
        return [
            Checked("record", name, found.record),
            Checked("document", name, found.document),
            Checked("mirror", name, found.mirror, repair),
        ]

    async def _look(self, key: DocumentKey) -> "_Look":
        try:
            record = await self._metadata.context(key.tenant, key.context_id)
        except RecordCorrupt as error:
            return _Look(error.reason, await self._document_problem(key), None)
        absent = _NO_RECORD if record is None else None
        document = await self._document_problem(key)
        try:
            return _Look(absent, document, await self._mirror_problem(key, record))
        except Incompatible as error:
            # Written by a newer version, which knows more than this one could write.
            return _Look(absent, document, str(error), is_newer=True)

    async def _document_problem(self, key: DocumentKey) -> str | None:
        try:
            await get_document(self._objects, key)
        except NotFound:
            return _MISSING
        except (Corrupt, Incompatible) as error:
            return str(error)
        return None

    async def _mirror_problem(self, key: DocumentKey, record: ContextRecord | None) -> str | None:
        try:
            mirror = await get_mirror(self._objects, key)
        except NotFound:
            return _MISSING
        except Corrupt as error:
            return str(error)
        if record is not None and _mirrored(mirror.record) != _mirrored(record):
            return "it is behind its record"
        return None

    async def _cache(self, tenant: str, cache_id: str, generation: str) -> Checked:
        name = f"{tenant}/{cache_id}/{generation}"
        try:
            await load(
                ObjectSource(self._objects),
                self._objects,
                self._metadata,
                self._leases,
                tenant,
                cache_id,
                expected=None,
                ratio=None,
            )
        except NotFound:
            # Deleted, or replaced again and again, while it was read.
            return Checked("cache", name)
        except RecordCorrupt as error:
            return Checked("record", name, error.reason)
        except Incompatible as error:
            return Checked("cache", name, str(error))
        except Corrupt as error:
            if error.generation is None or not self._repairs:
                return Checked("cache", name, str(error))
            await require_bound(self._objects, self._metadata)
            await self._rebuild(tenant, cache_id, error.generation)
            return Checked("cache", name, str(error), _REBUILT)
        return Checked("cache", name)

    async def _rebuild(self, tenant: str, cache_id: str, generation: str) -> None:
        for context_id in await quarantine(
            self._objects, self._metadata, tenant, cache_id, generation
        ):
            await self._jobs.enqueue(tenant, context_id)


@dataclass(frozen=True, slots=True)
class _Look:
    """What is wrong with the three parts of a context; None where nothing is."""

    record: str | None
    document: str | None
    mirror: str | None
    is_newer: bool = False

    @property
    def may_mirror(self) -> bool:
        """Whether to write the mirror; beside no document, it would make a loss of a deletion."""
        has_record, has_document = self.record is None, self.document != _MISSING
        return self.mirror is not None and has_record and has_document and not self.is_newer

    @property
    def has_problem(self) -> bool:
        return any(problem is not None for problem in (self.record, self.document, self.mirror))

    @property
    def is_gone(self) -> bool:
        return (self.record, self.document, self.mirror) == (_NO_RECORD, _MISSING, _MISSING)


def _mirrored(record: ContextRecord) -> ContextRecord:
    """What a reindex takes from a mirror; the rest it finds in the cache, or counts anew."""
    return replace(
        record.without_cache(),
        status="failed" if record.status == "failed" else "queued",
        ready_at=None,
        last_used_at=None,
        expires_at=None,
        policy_applied="",
        timings={},
        queries=0,
        error_code=None,
        error_detail=None,
    )
