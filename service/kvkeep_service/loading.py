"""One cache from storage to the engine: read, verified, made tensors of, and told as it comes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvkeep_service.bringing import Brought, Receiver
from kvkeep_service.engine.arrival import LayerArrival
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.errors import WorkerUnavailable
from kvkeep_service.host_tier import HostTier, moved
from kvkeep_service.ports import CacheSource
from kvkeep_service.rows import to_engine
from kvkeep_service.shelf import CacheKey
from kvkeep_service.stores import Stores
from kvkeep_storage.arrival import ArrivingRows
from kvkeep_storage.errors import Invalid, NotFound
from kvkeep_storage.fingerprint import ModelIdentity
from kvkeep_storage.load import load
from kvkeep_storage.manifest import Manifest
from kvkeep_storage.pieces import Filled
from kvkeep_storage.sources import Origin, Source


async def bring(
    stores: Stores,
    expected: ModelIdentity,
    model: LanguageModel,
    key: CacheKey,
    ratio: float,
    first_ratio: float,
    receiver: Receiver,
    host: HostTier | None,
) -> Brought:
    """Implements ``bringing.Bring`` for one model, where that is.

    On a CPU the engine reads the very buffers that are being filled, so a part of them can be
    used; elsewhere nothing is told before everything was copied, from the ``host`` tier where
    that has it.
    Raises: what ``load`` raises; NotFound, when the cache is not cut at these ratios.
    """
    device, windows = model.device, model.shape.windows
    if host is not None and (kept := host.find(key, ratio)) is not None:
        receiver.room(kept.size_bytes)
        context = await asyncio.to_thread(moved, kept, device)
        return Brought(context, "host", context.size_bytes)
    source = _Metered(stores.source)
    arriving = _Arriving(first_ratio, model, receiver, source)
    try:
        loaded = await load(
            source,
            stores.objects,
            stores.metadata,
            stores.leases,
            key.tenant,
            key.cache_id,
            expected=expected,
            ratio=ratio,
            first_ratio=first_ratio,
            observer=arriving,
            room_for=stores.memory.room,
        )
    except BaseException as error:
        arriving.fail(error)
        if isinstance(error, Invalid) and error.field in ("ratio", "first_ratio"):
            raise NotFound("cache", f"{key.cache_id} at ratio {ratio}") from error
        raise
    if arriving.context is not None:
        counts = torch.from_numpy(loaded.rows.counts)
        context = arriving.context.extended(counts, loaded.rows.ratios)
    else:
        whole = await asyncio.to_thread(
            to_engine, loaded.rows, loaded.manifest.tokens_total, device, windows
        )
        context = replace(whole, generation=loaded.cache.generation)
    return Brought(context, loaded.source, source.read_bytes)


class _Metered:
    """A source that counts the bytes read from it, and remembers where they came from."""

    def __init__(self, inner: Source) -> None:
        self._inner = inner
        self.read_bytes = 0
        self.found: CacheSource = "store"

    async def get(self, key: str) -> bytes:
        content = await self._inner.get(key)
        self.read_bytes += len(content)
        return content

    async def size(self, key: str) -> int:
        return await self._inner.size(key)

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        await self._inner.read_ranges(key, start, into, on_filled)
        self.read_bytes += sum(map(len, into))

    async def forget(self, prefix: str) -> None:
        # Whatever is read from here on comes from the store.
        self.found = "store"
        await self._inner.forget(prefix)

    async def origin(self, prefix: str) -> Origin:
        found = await self._inner.origin(prefix)
        self.found = found
        return found


class _Arriving:
    """Implements ``LoadObserver``: hands a receiver what the engine can use."""

    def __init__(
        self, first_ratio: float, model: LanguageModel, receiver: Receiver, source: _Metered
    ) -> None:
        self._first_ratio = first_ratio
        self._device, self._windows = model.device, model.shape.windows
        self._receiver = receiver
        self._source = source
        self._arrival: LayerArrival | None = None
        self.context: ResidentContext | None = None

    def on_room(self, rows: ArrivingRows, manifest: Manifest, generation: str) -> None:
        self._receiver.room(sum(layer.kv_bytes for layer in rows.layers))
        if self._device.type != "cpu":
            return
        whole = to_engine(rows, manifest.tokens_total, self._device, self._windows)
        self._arrival = LayerArrival(len(rows.layers))
        bands = rows.ratios.index(self._first_ratio) + 1
        self.context = replace(
            whole,
            counts=whole.counts[:bands],
            ratios=rows.ratios[:bands],
            arrival=self._arrival,
            generation=generation,
        )

    def on_layer(self, index: int) -> None:
        if self._arrival is None or self.context is None:
            return
        self._arrival.arrived(index)
        if index == 0:
            self._receiver.usable(self.context, self._source.found)

    def on_first(self) -> None:
        if self.context is not None:
            self._receiver.first()

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for layers that they will not come."""
        if self._arrival is not None:
            # A cancellation is the load's own; it must not cancel those who hear of it.
            told = error if isinstance(error, Exception) else WorkerUnavailable("it was given up")
            self._arrival.fail(told)
