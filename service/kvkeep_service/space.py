"""Whether a build would find space in the store: asked again once one of them found none.

A build takes minutes and is lost when its cache cannot be stored, so none is begun while there
is no space; and none fails because of it, since space may come back.
"""

import time
from collections.abc import Callable
from typing import Final

from kvkeep_storage.errors import Full, ObjectsUnavailable
from kvkeep_storage.objects import Objects

_PAUSE_SECONDS: Final = 15.0
_PAUSE_SECONDS_MAX: Final = 15 * 60.0
_PROBE_BYTES_MAX: Final = 256 * 2**20


class Space:
    """Remembers that the store was full; used by one builder."""

    def __init__(self, objects: Objects, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` tells seconds."""
        self._objects = objects
        self._clock = clock
        self._wanted_bytes = 0
        self._pause_seconds = _PAUSE_SECONDS
        self._ask_at = 0.0
        self.is_full = False

    def ran_out(self, size_bytes: int) -> None:
        """A cache of so many bytes could not be stored; each time in a row waits twice as long.

        A probe is smaller than a very large cache, so it may pass where the cache would not.
        """
        self.is_full = True
        self._wanted_bytes = min(size_bytes, _PROBE_BYTES_MAX)
        self._ask_at = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _PAUSE_SECONDS_MAX)

    def was_enough(self) -> None:
        """A cache was stored."""
        self.is_full = False
        self._pause_seconds = _PAUSE_SECONDS

    async def is_there(self) -> bool:
        """Whether a build may begin; tries the store when it was full some time ago."""
        if not self.is_full:
            return True
        if self._clock() < self._ask_at:
            return False
        try:
            await self._objects.probe_space(self._wanted_bytes)
        except (Full, ObjectsUnavailable):
            self._ask_at = self._clock() + _PAUSE_SECONDS
            return False
        self.is_full = False
        return True
