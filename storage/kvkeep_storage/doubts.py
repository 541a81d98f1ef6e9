"""Telling bytes that are wrong in the store from bytes that went wrong on the way."""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvkeep_storage.errors import Corrupt, ObjectsUnavailable
from kvkeep_storage.retries import ATTEMPTS
from kvkeep_storage.sources import Source

Result = TypeVar("Result")


class Doubts:
    """What was read wrong of one generation.

    Wrong bytes are proven when the same come again, after every nearer copy was forgotten: only
    then is it the store that holds them. A name that gives other wrong bytes at every try says
    nothing about what is stored.
    """

    def __init__(self, source: Source, prefix: str) -> None:
        """``prefix`` is the directory of the generation."""
        self._source = source
        self._prefix = prefix
        self._seen: set[tuple[str, str]] = set()
        self._tries: Counter[str] = Counter()

    @property
    def any(self) -> bool:
        """Whether anything was read wrong, so that nearer copies are forgotten."""
        return bool(self._seen)

    async def weigh(self, error: Corrupt) -> None:
        """Return when it is worth reading again, which then comes from the store itself.

        ``error.reason`` must tell one set of wrong bytes from another.
        Raises: the error itself when it is proven; ObjectsUnavailable after too many tries.
        """
        evidence = (error.name, error.reason)
        if evidence in self._seen:
            raise error
        self._seen.add(evidence)
        self._tries[error.name] += 1
        if self._tries[error.name] == ATTEMPTS:
            raise ObjectsUnavailable("read", f"{error.name}: other bytes at every try") from error
        await self._source.forget(self._prefix)

    async def settle(self, read: Callable[[], Awaitable[Result]]) -> Result:
        """Read until the bytes are right or proven wrong. Raises: as ``weigh``, and ``read``."""
        while True:
            try:
                return await read()
            except Corrupt as error:
                await self.weigh(error)
