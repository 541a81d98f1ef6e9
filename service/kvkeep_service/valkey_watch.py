"""Keeping the embedded Valkey alive under a running server: one that dies is started again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog

from kvkeep_service.telemetry import where
from kvkeep_storage.embedded import EmbeddedStore
from kvkeep_storage.errors import StorageError

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 0.5
# One that cannot be started leaves a line in the log for each try.
_TRY_AGAIN_SECONDS: Final = 2.0


@asynccontextmanager
async def kept_alive(store: EmbeddedStore | None) -> AsyncIterator[None]:
    """Look after the Valkey of a data directory for the length of a ``with`` block.

    It comes back with what it had, so leases and jobs of this process are valid still.
    """
    if store is None:
        yield
        return
    watching = asyncio.create_task(_watch(store))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def _watch(store: EmbeddedStore) -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            if await asyncio.to_thread(store.revive):
                _log.error("embedded_valkey_restarted")
        except StorageError as error:
            _log.error("embedded_valkey_cannot_start", detail=str(error))
            await asyncio.sleep(_TRY_AGAIN_SECONDS)
        # Nobody would notice that it is no longer looked after.
        except Exception as error:  # noqa: BLE001
            _log.error("embedded_valkey_watch_error", where=where(error))
            await asyncio.sleep(_TRY_AGAIN_SECONDS)
