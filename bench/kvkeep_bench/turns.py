"""Steps measured in turns, by a clock that fits the number of threads."""

import time
from collections.abc import Callable, Mapping

import torch

from kvkeep_bench.samples import Samples


def clock_of(threads: int) -> str:
    """What ``in_turns`` counts, in words."""
    return "CPU time of one thread" if threads == 1 else f"time on the wall, {threads} threads"


def in_turns(steps: Mapping[str, Callable[[], None]], repeats: int, threads: int) -> Samples:
    """Run every step once unmeasured, then ``repeats`` times, every other time backwards."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    samples, names = Samples(), list(steps)
    with torch.inference_mode():
        for name in names:
            steps[name]()
        for repeat in range(repeats):
            for name in names if repeat % 2 == 0 else reversed(names):
                started = clock()
                steps[name]()
                samples.add(name, clock() - started)
    return samples
