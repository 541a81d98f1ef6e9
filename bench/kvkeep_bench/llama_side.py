"""llama.cpp's server as a baseline: the same questions at once on one context, over HTTP.

Its answers come from the whole cache: every slot holds the context's rows, read once and copied.
"""

import json
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

import httpx2

from kvkeep_bench.serving_load import Answers

WORKER = Path(__file__).with_name("llama_worker.py")
_SECONDS = 600.0
_SAVED = "context.bin"


class LlamaSide:
    """A running server. Use it as a context manager: leaving it ends the process."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        slots: int,
        slot_tokens: int,
        threads: int,
        folder: Path,
        errors: IO[bytes],
    ) -> None:
        """``python``: of an environment that has xllamacpp. ``errors`` takes its stderr."""
        self._slots = slots
        self._process = subprocess.Popen(
            [python, WORKER, model, str(slots), str(slot_tokens), str(threads), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert self._process.stdout is not None
        self.about = self._process.stdout.readline().decode().strip()
        """Its version, and what of the CPU it was built for."""
        address = self._process.stdout.readline().decode().strip()
        if not address:
            raise RuntimeError(f"llama.cpp's server ended with {self._process.wait()}")
        limits = httpx2.Limits(max_connections=slots)
        self._http = httpx2.Client(base_url=address, timeout=_SECONDS, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()

    def read_context(self, ids: Sequence[int]) -> None:
        """Have the rows of these tokens in every slot. Modifies: all slots, and a file."""
        self._post("/completion", {"prompt": list(ids), "n_predict": 0, "id_slot": 0})
        self._post("/slots/0?action=save", {"filename": _SAVED})
        for slot in range(1, self._slots):
            self._post(f"/slots/{slot}?action=restore", {"filename": _SAVED})

    def together(
        self, context: Sequence[int], questions: Sequence[Sequence[int]], answer_tokens: int
    ) -> Answers:
        """A question of every slot at once, greedily, never stopping early."""
        times: list[list[float]] = [[] for _ in questions]

        def ask(slot: int) -> None:
            asked = {
                "prompt": [*context, *questions[slot]],
                "n_predict": answer_tokens,
                "id_slot": slot,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_tokens": True,
            }
            with self._http.stream("POST", "/completion", json=asked) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        times[slot] += [time.perf_counter()] * len(event["tokens"])

        threads = [threading.Thread(target=ask, args=(slot,)) for slot in range(len(questions))]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answers = Answers(began, time.perf_counter())
        for own in times:
            answers.add(began, own)
        return answers

    def _post(self, path: str, body: object) -> None:
        self._http.post(path, json=body).raise_for_status()
