"""What happens when a stored cache is proven wrong or found missing: rebuild it, or fail it."""

import structlog

from kvkeep_service.stores import Stores
from kvkeep_storage.errors import Corrupt, NotFound
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
    ) -> None:
        """Quarantine the generation that ``error`` names; its contexts are built again.

        ``context_id`` is the context that was asked; it is rebuilt even when no cache record
        is left to quarantine. Raises: MetadataUnavailable, and then nothing has changed.
        """
        stores = self._stores
        if isinstance(error, Corrupt):
            assert error.generation is not None, "only what is proven leads here"
            _log.warning("cache_quarantined", cache=cache_id, generation=error.generation)
            ids = await quarantine(
                stores.objects, stores.metadata, tenant, cache_id, error.generation
            )
        else:
            ids = await self._without_cache(tenant, context_id)
        for waiting_id in ids:
            if self._rebuilds:
                await stores.jobs.enqueue(tenant, waiting_id)
            else:
                await stores.metadata.fail_context(
                    tenant, waiting_id, "cache_corrupt", "the stored cache is damaged"
                )

    async def _without_cache(self, tenant: str, context_id: str) -> list[str]:
        """A ready context whose cache no record knows: records were lost, bytes may be."""
        record = await self._stores.metadata.context(tenant, context_id)
        if record is None or record.status != "ready":
            return []
        _log.warning("cache_record_missing", context=context_id)
        await self._stores.metadata.set_building(tenant, context_id, rebuilding=True)
        return [context_id]
