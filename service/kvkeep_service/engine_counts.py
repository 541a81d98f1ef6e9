"""What the engine has done since its start, as metrics show it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How decode steps ran on a GPU: replayed from a graph, or launched kernel by kernel.

    ``graphs_failed``: 1 once a graph was found wrong, or could not be made; none is used then.
    """

    replayed: int = 0
    launched: int = 0
    graphs_failed: int = 0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Where the engine's time went, and how often memory ran out, since the start.

    ``shed``: answers that were ended for want of memory.
    """

    answer_seconds: float
    build_seconds: float
    out_of_memory: int
    shed: int
    steps: StepCounts = StepCounts()
