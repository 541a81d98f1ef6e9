"""Calling again, a bounded number of times, what may work later."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import stamina

from kvkeep_storage.errors import Unavailable

Result = TypeVar("Result")

ATTEMPTS = 4
PAUSE_SECONDS_FIRST = 0.1
PAUSE_SECONDS_MAX = 2.0


async def retrying(call: Callable[[], Awaitable[Result]]) -> Result:
    """Call until a store is available, with growing pauses; the last failure is raised.

    Attempts that were made further down, by a store's own client, count as made here: retries
    never multiply. ``call`` must be safe to repeat after a reply was lost.
    Raises: what ``call`` raises.
    """
    made = 0

    def worth_another(error: Exception) -> bool:
        nonlocal made
        if not isinstance(error, Unavailable):
            return False
        made += error.attempts
        return made < ATTEMPTS

    # What counts attempts costs more than most calls, of which nearly all succeed.
    try:
        return await call()
    except Unavailable as error:
        failed: Unavailable | None = error
    async for attempt in stamina.retry_context(
        on=worth_another,
        attempts=ATTEMPTS,
        timeout=None,
        wait_initial=PAUSE_SECONDS_FIRST,
        wait_max=PAUSE_SECONDS_MAX,
        wait_jitter=PAUSE_SECONDS_FIRST,
    ):
        with attempt:
            if failed is not None:
                first, failed = failed, None
                raise first
            result = await call()
    return result
