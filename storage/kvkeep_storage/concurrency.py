"""Running a bounded number of coroutines at once, all or nothing."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def run_together(
    coroutines: Iterable[Coroutine[Any, Any, Result]], *, limit: int
) -> list[Result]:
    """Run every coroutine, at most ``limit`` at a time; return their results in order.

    The first failure cancels the others, waits for them to end, and is raised as it is.
    """
    gate = asyncio.Semaphore(limit)

    async def gated(coroutine: Coroutine[Any, Any, Result]) -> Result:
        async with gate:
            return await coroutine

    waiting = list(coroutines)
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gated(coroutine)) for coroutine in waiting]
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    finally:
        # Closes what was cancelled before it started; the others ignore it.
        for coroutine in waiting:
            coroutine.close()
    if failure is not None:
        raise failure
    return [task.result() for task in tasks]
