"""One build between the event loop and the engine's thread."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvkeep_service.auto_ratio import AutoRatio
from kvkeep_service.engine.build import BuiltCache, Progress, build
from kvkeep_service.engine.builds import BuildTask
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.scheduler import Scheduler
from kvkeep_service.heartbeat import ContextDeleted
from kvkeep_service.plan import BuildPlan


async def run_build(
    scheduler: Scheduler,
    model: LanguageModel,
    plan: BuildPlan,
    ratios: tuple[float, ...] | AutoRatio,
    report: Callable[[Progress], None],
) -> BuiltCache:
    """Hand a build to the engine's thread and wait for it; cancelling abandons it.

    ``report`` is called on the event loop.
    Raises: WorkerUnavailable, ContextDeleted, and whatever ended the build.
    """
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[BuiltCache] = loop.create_future()

    def settle(built: BuiltCache | None, error: BaseException | None) -> None:
        if finished.done():
            return
        if built is not None:
            finished.set_result(built)
        else:
            finished.set_exception(error or ContextDeleted())

    task = BuildTask(
        steps=build(
            model,
            plan.document,
            policy=plan.policy,
            ratios=ratios,
            quantization=plan.quantization,
            repeat_prompt=plan.repeat_prompt,
        ),
        on_progress=lambda progress: _post(loop, report, progress),
        on_finished=lambda built, error: _post(loop, settle, built, error),
    )
    scheduler.submit_build(task)
    try:
        return await finished
    finally:
        task.cancelled.set()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Call something on the event loop from the engine's thread; a closed loop needs no news."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)
