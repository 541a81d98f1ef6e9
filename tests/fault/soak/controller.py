"""Keeps victims at work, and kills them at random moments."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .notes import IDLE, running_operation
from .storage_calls import Place
from .victim import OPERATIONS, main

_FORKS = multiprocessing.get_context("forkserver")
# Half of the kills wait for an operation of a kind, so that rare ones are hit as well.
_AIMED_SHARE = 0.5
_AIM_SECONDS = 3.0
_INSIDE_SECONDS_MAX = 0.04
# So many of the last kills are meant for each kind that none has hit.
_AIMS = 3
_ANYWHERE_SECONDS = (0.02, 0.8)
_POLL_SECONDS = 0.001


def prepare() -> None:
    """Let victims be forked from a process that has loaded their code already."""
    _FORKS.set_forkserver_preload([f"{__package__}.victim"])


@dataclass(slots=True)
class Controller:
    """``folder`` takes the notes. ``hits`` counts kills by what they interrupted."""

    place: Place
    folder: Path
    chance: random.Random
    num_victims: int
    hits: Counter[str] = field(default_factory=Counter)
    _alive: dict[str, "multiprocessing.process.BaseProcess"] = field(default_factory=dict)
    _started: int = 0

    def run(self, kills: int) -> None:
        """Kill so many times, and all of them in the end."""
        while self.hits.total() < kills:
            self._fill()
            wanted = kills - self.hits.total()
            if self.chance.random() < _AIMED_SHARE or wanted <= _AIMS * len(self.missed):
                self._kill([self._aim()])
            else:
                time.sleep(self.chance.uniform(*_ANYWHERE_SECONDS))
                # Sometimes several at once, as when a machine loses power.
                count = self.chance.randint(1, min(wanted, self.num_victims))
                self._kill(self.chance.sample(sorted(self._alive), count))
        self._kill(sorted(self._alive), is_end=True)

    def _fill(self) -> None:
        while len(self._alive) < self.num_victims:
            name = f"victim-{self._started:04d}"
            arguments = (self.place, self.folder, name, self.chance.getrandbits(32))
            process = _FORKS.Process(target=main, args=arguments, name=name, daemon=True)
            process.start()
            self._alive[name] = process
            self._started += 1

    def _aim(self) -> str:
        """The victim to kill: one that has just been seen at what was hit least so far."""
        kind = min(OPERATIONS, key=lambda operation: (self.hits[operation], self.chance.random()))
        give_up_at = time.monotonic() + _AIM_SECONDS
        while time.monotonic() < give_up_at:
            for name in self._alive:
                if running_operation(self.folder, name) == kind:
                    if self.hits[kind]:
                        time.sleep(self.chance.uniform(0, _INSIDE_SECONDS_MAX))
                    return name
            time.sleep(_POLL_SECONDS)
        return self.chance.choice(sorted(self._alive))

    def _kill(self, names: list[str], *, is_end: bool = False) -> None:
        processes = [self._alive.pop(name) for name in names]
        for process in processes:
            assert process.pid is not None
            # Gone already: the exit code tells.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for name, process in zip(names, processes, strict=True):
            process.join()
            assert process.exitcode == -signal.SIGKILL, f"ended by itself: see {name}.log"
            if not is_end:
                self.hits[running_operation(self.folder, name)] += 1

    @property
    def missed(self) -> list[str]:
        """Operations that no kill has interrupted."""
        return [operation for operation in OPERATIONS if not self.hits[operation]]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} in {what}" for what, count in self.hits.most_common())
        return counts.replace(f"in {IDLE}", "between two")
