"""Timing on a device, with a budget: CUDA events around graph replays, medians, cold operands."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Step = Callable[[], object]


class OutOfTime(Exception):
    """The budget of the whole run is spent; what was measured stays."""


class Clock:
    """Measures steps on one device until the budget is spent."""

    def __init__(
        self, device: torch.device, seconds: float, *, warm_ups: int = 3, repeats: int = 20
    ) -> None:
        self.device = device
        self._warm_ups = warm_ups
        self._ends_at = time.monotonic() + seconds
        self._repeats = repeats

    def require(self, seconds: float) -> None:
        """Raises: OutOfTime, when less than ``seconds`` of the budget are left."""
        if time.monotonic() + seconds > self._ends_at:
            raise OutOfTime

    def milliseconds(self, steps: Sequence[Step]) -> float:
        """Median time of one step. ``steps`` do the same work on different operands, in turns.

        All of them are captured in one graph, so that neither the host nor a warm cache counts:
        give as many as it takes for their operands to exceed the cache.
        """
        self.require(2.0)
        replay = self._captured(steps)
        for _ in range(self._warm_ups):
            replay()
        times = [self._once(replay) for _ in range(self._repeats)]
        return statistics.median(times) / len(steps)

    def milliseconds_launched(self, step: Step) -> float:
        """Median time of one step with its launches from the host, which waits after each."""
        self.require(2.0)
        for _ in range(self._warm_ups):
            step()
        return statistics.median(self._once(step) for _ in range(self._repeats))

    def _captured(self, steps: Sequence[Step]) -> Step:
        def run() -> None:
            for step in steps:
                step()

        if self.device.type != "cuda":
            return run
        # Compiles and allocates before the capture, on a stream of its own as capture asks.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _once(self, step: Step) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            step()
            return 1000 * (time.perf_counter() - started)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        step()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)
