import asyncio

import pytest

from kvkeep_storage.concurrency import run_together

pytestmark = pytest.mark.anyio


async def _one(value: int) -> int:
    await asyncio.sleep(0)
    return value


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("limit", [1, 2, 20])
async def test_results_come_in_order(count: int, limit: int) -> None:
    found = await run_together((_one(n) for n in range(count)), limit=limit)
    assert found == list(range(count))


async def test_no_more_than_the_limit_run_at_once() -> None:
    running, seen = 0, []

    async def counted() -> None:
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0)
        running -= 1

    await run_together((counted() for _ in range(9)), limit=3)
    assert max(seen) == 3
    assert len(seen) == 9


async def test_after_a_failure_running_ones_end_and_no_other_starts() -> None:
    done: list[str] = []
    started, failed = asyncio.Event(), asyncio.Event()

    async def failing() -> None:
        await started.wait()
        failed.set()
        raise KeyError("first")

    async def running() -> None:
        started.set()
        await failed.wait()
        await asyncio.sleep(0)
        done.append("running one ended")

    async def late() -> None:
        done.append("late one started")

    with pytest.raises(KeyError, match="first"):
        await run_together([failing(), running(), late(), late()], limit=2)
    assert done == ["running one ended"]


async def test_being_cancelled_cancels_what_runs() -> None:
    started, cancelled = asyncio.Event(), []

    async def hanging() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    task = asyncio.create_task(run_together([hanging(), hanging(), hanging()], limit=2))
    await started.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [True, True]
