"""Calling again, a bounded number of times, what may work later."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import stamina

from kvkeep_storage.errors import Unavailable

Result = TypeVar("Result")

ATTEMPTS = 4
_PAUSE_SECONDS_FIRST = 0.1
_PAUSE_SECONDS_MAX = 2.0


async def retrying(call: Callable[[], Awaitable[Result]]) -> Result:
    """Call until a store is available, with growing pauses; the last failure is raised.

    ``call`` must be safe to repeat after a reply was lost. Raises: what ``call`` raises.
    """
    async for attempt in stamina.retry_context(
        on=Unavailable,
        attempts=ATTEMPTS,
        timeout=None,
        wait_initial=_PAUSE_SECONDS_FIRST,
        wait_max=_PAUSE_SECONDS_MAX,
        wait_jitter=_PAUSE_SECONDS_FIRST,
    ):
        with attempt:
            result = await call()
    return result
