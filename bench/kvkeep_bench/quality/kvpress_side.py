"""Answers of kvpress, in a process of its own: it needs another transformers than ours.

Both see the same token ids. What is asked for is sent as one JSON line, answers come back as one.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from kvkeep_bench.quality.items import Item

WORKER = Path(__file__).with_name("kvpress_worker.py")


class KVPressSide:
    """A running worker. Use it as a context manager: leaving it ends the process."""

    def __init__(self, python: Path, model: Path, errors: IO[bytes]) -> None:
        """``python``: of an environment that has kvpress 0.5. ``errors`` takes its stderr."""
        self._process = subprocess.Popen(
            [python, WORKER, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def answers(
        self, item: Item, document: Sequence[int], questions: Sequence[Sequence[int]], ratio: float
    ) -> tuple[str, ...]:
        """Answers to an item's questions with ``ratio`` of its pairs kept.

        Raises: RuntimeError when the worker ended.
        """
        asked = {
            "document": list(document),
            "questions": [list(ids) for ids in questions],
            "max_tokens": [question.max_tokens for question in item.questions],
            "removed": round(1 - ratio, 6),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"kvpress ended with {self._process.wait()}")
        return tuple(json.loads(line))
