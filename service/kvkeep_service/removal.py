"""Deleting a context, and the bytes of a cache that nobody refers to any more."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import structlog

from kvkeep_service.deletions import Deletions
from kvkeep_service.ports import Worker
from kvkeep_service.stores import Stores
from kvkeep_storage.documents import delete_document
from kvkeep_storage.errors import StorageError
from kvkeep_storage.generations import release_generation
from kvkeep_storage.keys import DocumentKey, GenerationKey
from kvkeep_storage.records import Released

_log = structlog.get_logger(__name__)

# How long a request waits for what usually takes milliseconds; the rest goes on behind it.
_PATIENCE_SECONDS: Final = 1.0
_READERS_POLL_SECONDS: Final = 0.1


class Remover:
    """Removes contexts. Holds the tasks that remove cache bytes once nobody reads them."""

    def __init__(self, stores: Stores, worker: Worker) -> None:
        """``worker`` is told which caches to forget."""
        self._stores = stores
        self._worker = worker
        self._tasks: set[asyncio.Task[None]] = set()
        self._deletions = Deletions()

    async def remove_context(self, tenant: str, context_id: str) -> bool:
        """Remove document, record, and the cache when this was its last context.

        When it returns, document and record are gone, and no reindex brings them back. Bytes of
        the cache usually are gone too; running queries and loads may hold them for longer, and
        the sweeper has them if this process ends first. A crash in between leaves a record that
        can be removed again. False when there was no such context.
        Raises: MetadataUnavailable, ObjectsUnavailable; it may be called again.
        """
        key = DocumentKey(tenant, context_id)
        await delete_document(self._stores.objects, key)
        released = await self._stores.metadata.delete_context(tenant, context_id)
        self._deletions.add(tenant, context_id)
        await self._worker.forget(tenant, context_id)
        # A worker may have mirrored the record between the two.
        await self._stores.objects.delete(key.mirror)
        await self._release(tenant, released)
        return released.existed

    async def undo_registration(self, tenant: str, context_id: str) -> None:
        """Remove what a registration that failed may have left.

        A store that is away takes its whole deadline again: who asked does not wait for that.
        """
        await self._patiently(self._remove_left_over(tenant, context_id))

    async def repeat_undone(self) -> None:
        """Delete again what this process has deleted and Redis has back, after a failover.

        Raises: MetadataUnavailable, ObjectsUnavailable; it may be called again.
        """
        for tenant, context_id in await self._deletions.undone(self._stores.metadata):
            _log.warning("deletion_undone", context=context_id, advice="it is deleted again")
            await self.remove_context(tenant, context_id)

    async def close(self) -> None:
        """Stop waiting for readers; what is left is the sweeper's. Modifies: this object."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, tenant: str, released: Released) -> None:
        if released.cache_id is None:
            return
        await self._patiently(self._remove_cache(tenant, released.cache_id, released.generation))

    async def _patiently(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=_PATIENCE_SECONDS)

    async def _remove_left_over(self, tenant: str, context_id: str) -> None:
        try:
            await self.remove_context(tenant, context_id)
        except StorageError as error:
            _log.warning("registration_left_over", code=error.code)

    async def _remove_cache(self, tenant: str, cache_id: str, generation: str | None) -> None:
        # The record is gone, so no new reader can come; the same content registered again is
        # built as another generation, which this does not touch.
        await self._worker.drop(tenant, cache_id)
        if generation is None:
            return
        key = GenerationKey(tenant, cache_id, generation)
        if self._stores.disk is not None:
            # Other processes look at the records every few seconds.
            await self._stores.disk.drop(key)
        try:
            # Nothing tells when a lease of another process ends: asking again is all there is.
            while not await release_generation(  # noqa: ASYNC110
                self._stores.objects, self._stores.metadata, self._stores.leases, key
            ):
                await asyncio.sleep(_READERS_POLL_SECONDS)
        except StorageError as error:
            _log.warning("cache_left_to_sweeper", cache_id=cache_id, code=error.code)
