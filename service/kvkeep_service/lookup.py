"""Reading context records: what a miss means, and what goes on while Redis is away."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from kvkeep_service.errors import RecordsForeign
from kvkeep_service.recent import RecentRecords
from kvkeep_service.stores import Stores
from kvkeep_storage.binding import require_bound
from kvkeep_storage.errors import MetadataUnavailable, StoreMismatch
from kvkeep_storage.records import ContextRecord

_log = structlog.get_logger(__name__)

# A Redis that just failed is not asked again for a record that is at hand: one that hangs would
# cost every question its whole time-out.
_ASK_AGAIN_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """A record, and whether it was read just now or comes from memory, Redis being away."""

    record: ContextRecord
    is_current: bool


class Lookup:
    """Reads records; keeps those of ready contexts for ``stale_seconds`` in case Redis goes."""

    def __init__(
        self, stores: Stores, stale_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` is monotonic."""
        self._stores = stores
        self._clock = clock
        self._recent = RecentRecords(stale_seconds, clock)
        self._failed_at = float("-inf")
        self._store_id: str | None = None

    async def context(self, tenant: str, context_id: str) -> ContextRecord | None:
        """Read a record; None when there is none, and the records are those of this store.

        Raises: RecordsForeign when they are not, for then nothing is known of the context;
            MetadataUnavailable, ObjectsUnavailable.
        """
        asked_at = self._recent.now()
        try:
            record = await self._stores.metadata.context(tenant, context_id)
            if record is None:
                self._recent.missed(tenant, context_id)
                await self.check_binding()
                return None
        except MetadataUnavailable:
            self._failed_at = self._clock()
            raise
        self._recent.saw(record, asked_at)
        return record

    async def answerable(self, tenant: str, context_id: str) -> Found | None:
        """Read a record for a question: while Redis is away, as it was last seen.

        Raises: as ``context``.
        """
        if self._clock() - self._failed_at < _ASK_AGAIN_SECONDS:
            recent = self._recent.find(tenant, context_id)
            if recent is not None:
                return Found(recent, is_current=False)
        try:
            record = await self.context(tenant, context_id)
        except MetadataUnavailable as error:
            recent = self._recent.find(tenant, context_id)
            if recent is None:
                raise
            _log.warning("answered_from_last_seen_record", context=context_id, code=error.code)
            return Found(recent, is_current=False)
        return None if record is None else Found(record, is_current=True)

    async def check_binding(self) -> None:
        """Return when the records are those of this store: else a miss says nothing.

        Raises: RecordsForeign; MetadataUnavailable, ObjectsUnavailable.
        """
        recorded = await self._stores.metadata.store_id()
        if recorded is not None and recorded == self._store_id:
            return
        try:
            # Only the first time, or when something is wrong: it reads the object store too.
            self._store_id = await require_bound(self._stores.objects, self._stores.metadata)
        except StoreMismatch as error:
            raise RecordsForeign from error

    def changed(self, tenant: str, context_id: str) -> None:
        """A change was begun, and may or may not have been made: what was seen is outdated."""
        self._recent.missed(tenant, context_id)

    def deleted(self, tenant: str, context_id: str) -> None:
        """A deletion was begun, which is to be final for this process however it ends."""
        self._recent.deleted(tenant, context_id)
