"""Running a bounded number of coroutines at once, all or nothing."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def run_together(
    coroutines: Iterable[Coroutine[Any, Any, Result]], *, limit: int
) -> list[Result]:
    """Run every coroutine, at most ``limit`` at a time; return their results in order.

    After a failure no other one is started, those that run are waited for, and the failure is
    raised. They are not cancelled, because a write in a thread would go on behind the caller's
    back while he cleans up after it. Being cancelled itself, it cancels them.
    """
    waiting = list(enumerate(coroutines))
    waiting.reverse()
    results: dict[int, Result] = {}

    async def work() -> None:
        while waiting:
            index, coroutine = waiting.pop()
            try:
                results[index] = await coroutine
            except BaseException:
                _discard(waiting)
                raise

    count = len(waiting)
    try:
        workers = (work() for _ in range(min(limit, count)))
        outcomes = await asyncio.gather(*workers, return_exceptions=True)
    finally:
        _discard(waiting)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
    return [results[index] for index in range(count)]


def _discard(waiting: list[tuple[int, Coroutine[Any, Any, Result]]]) -> None:
    for _, coroutine in waiting:
        coroutine.close()
    waiting.clear()
