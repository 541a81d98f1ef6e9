"""Where a load reads a cache from: the object store, or a nearer copy of it.

Nothing that comes from a source is trusted before its digest has matched, wherever it lay.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from kvkeep_storage.objects import Objects
from kvkeep_storage.pieces import Filled

Origin: TypeAlias = Literal["disk", "store"]


class Source(Protocol):
    """Bytes of committed generations, by the keys of the object store.

    Every read raises what ``Objects`` raises for it: NotFound, Corrupt (an object that ends too
    early) and ObjectsUnavailable.
    """

    async def get(self, key: str) -> bytes:
        """Read a small object whole."""
        ...

    async def size(self, key: str) -> int:
        """Size of an object in bytes."""
        ...

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """Fill buffers, one after the other, with the bytes of an object from ``start`` on.

        ``on_filled`` hears of every byte after it was last written, if of any: who was not told
        of all of them looks for himself.

        Modifies: ``into``. After a cancellation, and after an ObjectsUnavailable that is
        ``abandoned``, bytes may still arrive there, so it must not be used again; after any
        other error nothing may arrive any more. Whoever reads the same bytes elsewhere after an
        abandoned read needs other buffers, or passes the error on.
        """
        ...

    async def forget(self, prefix: str) -> None:
        """Drop any nearer copy of a generation: bytes read from here were wrong.

        The next read of the objects below ``prefix`` comes from the object store itself.
        Modifies nothing in the object store. Never fails because there was no copy.
        """
        ...

    async def origin(self, prefix: str) -> Origin:
        """Where the bytes of a generation would come from now."""
        ...


class ObjectSource:
    """The object store itself: nothing is nearer, so there is nothing to forget."""

    def __init__(self, objects: Objects) -> None:
        """Read from ``objects``."""
        self._objects = objects

    async def get(self, key: str) -> bytes:
        """Read a small object whole. Raises: NotFound, ObjectsUnavailable."""
        return await self._objects.get(key)

    async def size(self, key: str) -> int:
        """Size of an object in bytes. Raises: NotFound, ObjectsUnavailable."""
        return await self._objects.size(key)

    async def read_ranges(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """Fill buffers from an object; see ``Objects.read_ranges``."""
        await self._objects.read_ranges(key, start, into, on_filled)

    async def forget(self, prefix: str) -> None:
        """Nothing nearer than the store holds a copy."""

    async def origin(self, prefix: str) -> Origin:
        """Always the store."""
        return "store"
