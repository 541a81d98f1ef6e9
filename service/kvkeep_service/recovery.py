"""What happens when a stored cache is proven wrong or found missing: rebuild it, or fail it."""

from collections.abc import Sequence
from contextlib import suppress

import structlog

from kvkeep_service.errors import ContextFailed, ContextNotFound, ContextNotReady, ServiceError
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import mirror_context
from kvkeep_storage.errors import Conflict, Corrupt, NotFound
from kvkeep_storage.keys import DocumentKey
from kvkeep_storage.load import quarantine

_log = structlog.get_logger(__name__)


def is_proven(error: Corrupt | NotFound) -> bool:
    """Whether a failed load has shown that the cache itself is wrong or gone."""
    return isinstance(error, NotFound) or error.generation is not None


class Recovery:
    """Takes a wrong cache out of service, and its contexts back into the build queue.

    Only bytes proven wrong lead here; trouble with network, memory or engine never does.
    """

    def __init__(self, stores: Stores, *, rebuilds: bool) -> None:
        """``rebuilds`` False: the contexts fail with ``cache_corrupt`` instead."""
        self._stores = stores
        self._rebuilds = rebuilds

    async def recover(
        self, tenant: str, cache_id: str, context_id: str, error: Corrupt | NotFound
    ) -> ServiceError:
        """Quarantine the generation that ``error`` names; its contexts are built again.

        ``context_id`` is the context that was asked; it is rebuilt even when no cache record
        is left to quarantine. Returns what its asker is to be told.
        Raises: StorageError; contexts that wait for a build by then are enqueued by reconciling.
        """
        if isinstance(error, Corrupt):
            await self.take_out(tenant, cache_id, error)
        else:
            # Nothing is damaged: the record is lost, or the store was over its cap.
            for waiting_id in await self._without_cache(tenant, cache_id, context_id):
                await self._stores.jobs.enqueue(tenant, waiting_id)
        return await self._told(tenant, context_id)

    async def take_out(self, tenant: str, cache_id: str, error: Corrupt) -> None:
        """Quarantine the generation that ``error`` names; its contexts are built again.

        Raises: as ``recover``.
        """
        stores = self._stores
        assert error.generation is not None, "only what is proven leads here"
        _log.warning("cache_quarantined", cache=cache_id, generation=error.generation)
        ids = await quarantine(stores.objects, stores.metadata, tenant, cache_id, error.generation)
        await self._build_again(tenant, ids)

    async def _build_again(self, tenant: str, ids: Sequence[str]) -> None:
        if self._rebuilds:
            for waiting_id in ids:
                await self._stores.jobs.enqueue(tenant, waiting_id)
        else:
            await self._fail(tenant, ids)

    async def _fail(self, tenant: str, ids: Sequence[str]) -> None:
        stores = self._stores
        for context_id in ids:
            await stores.metadata.fail_context(
                tenant, context_id, "cache_corrupt", "the stored cache is damaged"
            )
        # All records first: a mirror that cannot be written must not leave one to be rebuilt.
        for context_id in ids:
            await mirror_context(stores.objects, stores.metadata, DocumentKey(tenant, context_id))

    async def _told(self, tenant: str, context_id: str) -> ServiceError:
        record = await self._stores.metadata.context(tenant, context_id)
        if record is None:
            return ContextNotFound(context_id)
        if record.status == "failed":
            return ContextFailed(
                context_id, record.error_code or "internal", record.error_detail or ""
            )
        return ContextNotReady(context_id, "rebuilding")

    async def _without_cache(self, tenant: str, cache_id: str, context_id: str) -> list[str]:
        """A ready context whose cache no record knows is built again."""
        record = await self._stores.metadata.context(tenant, context_id)
        if record is None or record.status != "ready":
            return []
        committed = await self._stores.metadata.cache(tenant, cache_id)
        if committed is not None and record.ratio in committed.ratios:
            # Replaced meanwhile by one that is not cut at the ratio of who asked: that one is
            # to ask again, and nobody else has lost anything.
            return []
        _log.warning("cache_record_missing", context=context_id)
        # Deleted, or taken care of by another query, in this very moment.
        with suppress(NotFound, Conflict):
            await self._stores.metadata.set_building(tenant, context_id, rebuilding=True)
            return [context_id]
        return []
