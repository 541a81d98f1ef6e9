"""kvpress's KVzip build timed in a process of its own: it needs another transformers than ours.

Token ids go out as one JSON line, seconds come back as one. Run as a script by the other Python,
the same file is the worker; what only that one has is imported there.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class BuildTimes:
    """Seconds, by the clock that fits the number of threads."""

    prefill_s: float
    build_s: float


class KVPressBuilds:
    """A running worker. Use it as a context manager: leaving it ends the process."""

    def __init__(self, python: Path, model: Path, threads: int) -> None:
        """``python``: of an environment that has kvpress 0.5."""
        self._process = subprocess.Popen(
            [python, __file__, model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def build(self, ids: Sequence[int], ratio: float) -> BuildTimes:
        """Prefill alone, and prefill with KVzip that keeps ``ratio``.

        Raises: RuntimeError when the worker ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        removed = round(1 - ratio, 6)
        print(json.dumps({"ids": list(ids), "removed": removed}), file=self._process.stdin)
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"kvpress ended with {self._process.wait()}")
        return BuildTimes(**json.loads(line))


def work(directory: str, threads: int) -> None:
    """Answer what comes in until there is no more."""
    import torch
    from kvpress import KVzipPress
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def seconds(step: Callable[[], object]) -> float:
        started = clock()
        step()
        return clock() - started

    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            ids = torch.tensor([asked["ids"]])

            def prefill(ids: torch.Tensor = ids) -> None:
                model.model(input_ids=ids, past_key_values=DynamicCache())

            def build(removed: float = asked["removed"], run: Callable[[], None] = prefill) -> None:
                with KVzipPress(compression_ratio=removed)(model):
                    run()

            times = {"prefill_s": seconds(prefill), "build_s": seconds(build)}
            print(json.dumps(times), flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
