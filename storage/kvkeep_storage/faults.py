"""A store that misbehaves on purpose, to see what a deployment makes of it.

``KVKEEP_FAULTS="error=0.05,short=0.02,seed=7"``: each name is a kind of fault, each number the
share of operations that meet it. The same seed and the same operations in the same order meet
the same faults.
"""

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Self

from kvkeep_storage.backends import Backend, ObjectInfo
from kvkeep_storage.errors import Invalid
from kvkeep_storage.pieces import Filled

_FIELD = "faults"
_DELAY_SECONDS_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what goes wrong: shares of operations from 0 to 1.

    ``error``: it fails, and nothing has happened. ``delay``: it begins ``delay_seconds`` later.
    ``short``: a read ends half-way. ``flip``: one bit of what a read returns is another.
    ``lost``: a write happens, and fails.
    """

    error: float = 0.0
    delay: float = 0.0
    short: float = 0.0
    flip: float = 0.0
    lost: float = 0.0
    delay_seconds: float = 1.0
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``name=number`` pairs between commas. Raises: Invalid."""
        known = {field.name for field in fields(cls)}
        values: dict[str, str] = {}
        for pair in text.split(","):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in known:
                raise Invalid(_FIELD, f"{name!r} is none of {', '.join(sorted(known))}")
            if name in values:
                raise Invalid(_FIELD, f"{name} stands there twice")
            values[name] = value
        return cls(**{name: _number(name, value) for name, value in values.items()})  # type: ignore[arg-type]  # seed is an int


def _number(name: str, value: str) -> float | int:
    try:
        if name == "seed":
            return int(value)
        number = float(value)
    except ValueError as error:
        raise Invalid(_FIELD, f"{name} = {value!r} is not a number") from error
    most = _DELAY_SECONDS_MAX if name == "delay_seconds" else 1.0
    if not 0.0 <= number <= most:
        raise Invalid(_FIELD, f"{name} = {value} is not between 0 and {most:g}")
    return number


class FaultyBackend:
    """Another backend, with faults in front of it."""

    def __init__(self, behind: Backend, faults: Faults) -> None:
        """Nothing of ``behind`` changes but how its answers arrive."""
        self._behind = behind
        self._faults = faults
        self._random = Random(faults.seed)

    @property
    def location(self) -> str:
        """That of the store behind."""
        return self._behind.location

    @property
    def is_remote(self) -> bool:
        """That of the store behind."""
        return self._behind.is_remote

    async def put(self, key: str, content: bytes) -> None:
        """Store an object, or not, or without saying so."""
        await self._before()
        await self._behind.put(key, content)
        self._after_write()

    async def put_if_absent(self, key: str, content: bytes) -> None:
        """Store an object unless there is one, or not, or without saying so."""
        await self._before()
        await self._behind.put_if_absent(key, content)
        self._after_write()

    async def get(self, key: str) -> bytes:
        """Read an object, or half of it, or something else."""
        await self._before()
        content = await self._behind.get(key)
        if self._happens(self._faults.short):
            content = content[: len(content) // 2]
        if self._happens(self._faults.flip) and content:
            changed = bytearray(content)
            changed[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
            content = bytes(changed)
        return content

    async def read(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """Fill buffers, or half of them, or with something else. Modifies: ``into``."""
        await self._before()
        if self._happens(self._faults.short):
            await self._behind.read(key, start, _first_half(into), on_filled)
            raise EOFError("injected: the read ends half-way")
        if self._happens(self._faults.flip):
            on_filled = self._flipping(start, into, on_filled)
        await self._behind.read(key, start, into, on_filled)

    async def size(self, key: str) -> int:
        """Size of an object in bytes."""
        await self._before()
        return await self._behind.size(key)

    async def delete(self, key: str) -> None:
        """Remove an object, or not, or without saying so."""
        await self._before()
        await self._behind.delete(key)
        self._after_write()

    async def pages(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """Every object below a directory, a page at a time."""
        await self._before()
        async for page in self._behind.pages(prefix):
            yield page

    async def delete_temporary_files(self, older_than_seconds: float) -> list[int]:
        """Those of the store behind."""
        await self._before()
        return await self._behind.delete_temporary_files(older_than_seconds)

    async def _before(self) -> None:
        if self._happens(self._faults.delay):
            await asyncio.sleep(self._faults.delay_seconds)
        if self._happens(self._faults.error):
            raise OSError(errno.EIO, f"injected: {os.strerror(errno.EIO)}")

    def _after_write(self) -> None:
        if self._happens(self._faults.lost):
            raise OSError(errno.EIO, "injected: it happened, and the reply is lost")

    def _happens(self, share: float) -> bool:
        # Drawn even when it cannot happen: a rate that changes leaves the other faults in place.
        return self._random.random() < share

    def _flipping(
        self, start: int, into: Sequence[memoryview], on_filled: Filled | None
    ) -> Filled | None:
        """Change a bit before anybody looks at it."""
        size_bytes = sum(map(len, into))
        if not size_bytes:
            return on_filled
        place = start + self._random.randrange(size_bytes)
        bit = 1 << self._random.randrange(8)

        def flip_and_tell(offset: int, views: Sequence[memoryview]) -> None:
            at = place - offset
            for view in views:
                if 0 <= at < len(view):
                    view[at] ^= bit
                at -= len(view)
            if on_filled is not None:
                on_filled(offset, views)

        return flip_and_tell


def _first_half(into: Sequence[memoryview]) -> list[memoryview]:
    room = sum(len(view) for view in into) // 2
    half = []
    for view in into:
        half.append(view[:room])
        room -= len(half[-1])
    return half
