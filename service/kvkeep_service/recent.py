"""Context records as they were last seen, for the time in which Redis cannot be asked."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias

from kvkeep_storage.records import ContextRecord

_Key: TypeAlias = tuple[str, str]

_RECORDS_MAX: Final = 10_000


class RecentRecords:
    """Ready contexts by (tenant, id), each for ``stale_seconds`` after it was read.

    What was deleted here is not remembered for as long, so that a look-up that was under way
    while it was deleted does not bring it back.
    """

    def __init__(self, stale_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """With 0 seconds, nothing is ever remembered."""
        self._stale_seconds = stale_seconds
        self._clock = clock
        # Each in the order of its times, so that what is over stands first.
        self._seen: OrderedDict[_Key, tuple[float, ContextRecord]] = OrderedDict()
        self._deleted: OrderedDict[_Key, float] = OrderedDict()

    def now(self) -> float:
        """The moment to hand to ``saw`` later: the one before Redis is asked."""
        return self._clock()

    def saw(self, record: ContextRecord, asked_at: float) -> None:
        """Remember a record that Redis was asked for at ``asked_at``; only a ready one answers."""
        key = (record.tenant, record.id)
        self._forget_what_is_over()
        if record.status != "ready":
            self._seen.pop(key, None)
        elif key not in self._deleted:
            self._seen[key] = (asked_at, record)
            self._seen.move_to_end(key)
            if len(self._seen) > _RECORDS_MAX:
                self._seen.popitem(last=False)

    def missed(self, tenant: str, context_id: str) -> None:
        """Forget a context that Redis does not know."""
        self._seen.pop((tenant, context_id), None)

    def deleted(self, tenant: str, context_id: str) -> None:
        """Forget a context that is being deleted here, however that ends."""
        key = (tenant, context_id)
        self._seen.pop(key, None)
        self._deleted[key] = self._clock()
        self._deleted.move_to_end(key)
        self._forget_what_is_over()

    def find(self, tenant: str, context_id: str) -> ContextRecord | None:
        """The record, if it was read within the last ``stale_seconds`` and not deleted since."""
        self._forget_what_is_over()
        _, record = self._seen.get((tenant, context_id), (0.0, None))
        return record

    def _forget_what_is_over(self) -> None:
        over_at = self._clock() - self._stale_seconds
        while self._seen and next(iter(self._seen.values()))[0] <= over_at:
            self._seen.popitem(last=False)
        while self._deleted and next(iter(self._deleted.values())) <= over_at:
            self._deleted.popitem(last=False)
