"""Verified caches in host memory, for when the device's copy has been given up.

Only where the engine computes on a device with memory of its own: on a CPU its caches are in
host memory anyway, and there is no such tier. What the device gives up is copied here, loaded or
built alike, and goes back bit for bit.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias

import numpy as np
import structlog
import torch
from torch import Tensor

from kvkeep_kernels.layout import ContextRows, Placement
from kvkeep_service.engine.cache import ResidentContext
from kvkeep_service.shelf import CacheKey
from kvkeep_storage.lru import CostAwareLru

_log = structlog.get_logger(__name__)

Allocate: TypeAlias = Callable[[int], memoryview]

# Every tensor begins at a multiple of this: enough for any dtype, and for whole cache lines.
_ALIGNED_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class HostStats:
    """A snapshot; ``size_bytes`` counts what is being copied too."""

    entries: int
    size_bytes: int
    budget_bytes: int
    hits: int
    misses: int
    evictions: int


class HostTier:
    """Copies by cache, in a byte budget. Belongs to the event loop."""

    def __init__(self, budget_bytes: int, allocate: Allocate) -> None:
        """``allocate`` gives writable memory of so many bytes, or raises."""
        self._allocate = allocate
        self._copies: dict[CacheKey, ResidentContext] = {}
        self._coming: dict[CacheKey, object] = {}
        self._lru: CostAwareLru[CacheKey] = CostAwareLru(budget_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._hits = self._misses = self._evictions = 0

    @property
    def keys(self) -> list[CacheKey]:
        """The caches that have a copy."""
        return list(self._copies)

    def find(self, key: CacheKey, ratio: float) -> ResidentContext | None:
        """The copy of a cache that is cut at a ratio, if there is one; this counts as a use.

        Its tensors are in host memory: see ``moved``.
        """
        found = self._copies.get(key)
        if found is None or ratio not in found.ratios:
            self._misses += 1
            return None
        self._hits += 1
        self._lru.touch(key)
        return found

    def keep(self, key: CacheKey, context: ResidentContext, cost_seconds: float) -> None:
        """Begin to copy a cache that the device has given up, if the budget has room for it.

        ``cost_seconds`` is what it took to load or build. The device's memory is free once it
        is copied, which is a matter of milliseconds.
        """
        if key in self._coming:
            return
        present = self._copies.get(key)
        if present is not None and set(present.ratios) >= set(context.ratios):
            self._lru.touch(key)
            return
        size_bytes = _size_of(context)
        if not self._make_room(key, size_bytes):
            return
        coming = self._coming[key] = object()
        self._lru.put(key, size_bytes, cost_seconds)
        self._lru.pin(key)
        task = asyncio.create_task(self._copy(key, context, coming))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for the copies that are being made."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def drop(self, key: CacheKey) -> None:
        """Forget a cache, also one that is being copied."""
        self._coming.pop(key, None)
        self._copies.pop(key, None)
        self._lru.remove(key)

    def stats(self) -> HostStats:
        """Counts as of now."""
        return HostStats(
            entries=len(self._copies),
            size_bytes=self._lru.size_bytes,
            budget_bytes=self._lru.budget_bytes,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    async def _copy(self, key: CacheKey, context: ResidentContext, coming: object) -> None:
        copied: ResidentContext | None = None
        try:
            copied = await asyncio.to_thread(_copied, context, self._allocate)
        except (MemoryError, RuntimeError) as error:
            # What torch raises when no more memory can be pinned.
            _log.warning("host_copy_failed", cache=key.cache_id, error=type(error).__name__)
        finally:
            # Unless it was dropped in the meantime.
            if self._coming.get(key) is coming:
                del self._coming[key]
                self._lru.unpin(key)
                if copied is None:
                    self._lru.remove(key)
                else:
                    self._copies[key] = copied

    def _make_room(self, key: CacheKey, size_bytes: int) -> bool:
        """Give up what the budget has no room for beside a new copy; False when that is not enough.

        A copy of the same cache with fewer bands goes in any case.
        """
        if size_bytes > self._lru.budget_bytes:
            return False
        self.drop(key)
        for victim in self._lru.victims(size_bytes):
            self._lru.evict(victim)
            del self._copies[victim]
            self._evictions += 1
        return self._lru.size_bytes + size_bytes <= self._lru.budget_bytes


def pinned_memory(num_bytes: int) -> memoryview:
    """Page-locked memory, from which CUDA copies without a detour. Raises: RuntimeError."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data


def moved(context: ResidentContext, device: torch.device) -> ResidentContext:
    """The same cache with its tensors on a device; blocks until they are there."""
    return _elsewhere(context, lambda tensor: tensor.to(device))


def _tensors(part: ContextRows | Placement) -> Mapping[str, Tensor]:
    """Every tensor of a layer or of its placement, whatever kinds of rows have."""
    found = ((field.name, getattr(part, field.name)) for field in fields(part))
    return {name: value for name, value in found if isinstance(value, Tensor)}


def _changed(layer: ContextRows, change: Callable[[Tensor], Tensor]) -> ContextRows:
    parts: dict[str, Any] = {name: change(value) for name, value in _tensors(layer).items()}
    if layer.placement is not None:
        parts["placement"] = replace(layer.placement, positions=change(layer.placement.positions))
    return replace(layer, **parts)


def _size_of(context: ResidentContext) -> int:
    parts: list[ContextRows | Placement] = list(context.layers)
    parts += [layer.placement for layer in context.layers if layer.placement is not None]
    tensors = [tensor for part in parts for tensor in _tensors(part).values()]
    return sum(_aligned(tensor.nbytes) for tensor in (*tensors, *(context.remainders or ())))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _copied(context: ResidentContext, allocate: Allocate) -> ResidentContext:
    memory = torch.from_numpy(np.frombuffer(allocate(_size_of(context)), np.uint8))
    used_bytes = 0

    def copy(tensor: Tensor) -> Tensor:
        nonlocal used_bytes
        place = memory[used_bytes : used_bytes + tensor.nbytes].view(tensor.dtype)
        used_bytes += _aligned(tensor.nbytes)
        return place.view(tensor.shape).copy_(tensor)

    return _elsewhere(context, copy)


def _elsewhere(context: ResidentContext, change: Callable[[Tensor], Tensor]) -> ResidentContext:
    """The same cache, whole by now, in other buffers."""
    remainders = context.remainders
    return ResidentContext(
        tuple(_changed(layer, change) for layer in context.layers),
        context.counts,
        context.ratios,
        context.num_tokens,
        generation=context.generation,
        remainders=None if remainders is None else tuple(change(own) for own in remainders),
    )
