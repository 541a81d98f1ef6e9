"""What a victim leaves behind when it is killed: what it was doing, and what it had been told.

Both are files of one process each, written with single system calls, so they survive SIGKILL.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_WIDTH = 16
IDLE = "idle"


class Notes:
    """Written by the victim. ``write`` returns once the note cannot be lost any more."""

    def __init__(self, folder: Path, name: str) -> None:
        self._doing = os.open(folder / f"{name}.doing", os.O_CREAT | os.O_WRONLY)
        self._told = os.open(folder / f"{name}.told", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._show(IDLE)

    @contextmanager
    def doing(self, operation: str) -> Iterator[None]:
        """Say what runs for the length of a ``with`` block."""
        self._show(operation)
        try:
            yield
        finally:
            self._show(IDLE)

    def write(self, what: str, tenant: str = "", context_id: str = "", detail: str = "") -> None:
        line = json.dumps([what, tenant, context_id, detail])
        os.write(self._told, f"{line}\n".encode())

    def _show(self, operation: str) -> None:
        os.pwrite(self._doing, operation.ljust(_WIDTH).encode(), 0)


def running_operation(folder: Path, name: str) -> str:
    """What a victim does now, or did when it was killed."""
    try:
        return (folder / f"{name}.doing").read_text().strip() or IDLE
    except FileNotFoundError:
        return IDLE


Context = tuple[str, str]


@dataclass(slots=True)
class Told:
    """Everything that all victims together were told, by (tenant, context id)."""

    registered: set[Context] = field(default_factory=set)
    expiring: set[Context] = field(default_factory=set)
    ready: set[Context] = field(default_factory=set)
    deleting: set[Context] = field(default_factory=set)
    deleted: set[Context] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def must_be_ready(self) -> set[Context]:
        """Contexts that were seen ready, and that nobody wanted to be without since."""
        return self.ready - self.deleting - self.expiring

    @property
    def must_exist(self) -> set[Context]:
        """Contexts whose registration was acknowledged, ready or not."""
        return self.registered - self.deleting - self.expiring

    @classmethod
    def read(cls, folder: Path) -> "Told":
        told = cls()
        for path in sorted(folder.glob("*.told")):
            # A line without its end was being written when the kill came.
            for line in path.read_text().split("\n")[:-1]:
                told._add(*json.loads(line))
        return told

    def _add(self, what: str, tenant: str, context_id: str, detail: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
        match what:
            case "registered":
                self.registered.add((tenant, context_id))
                if detail == "expiring":
                    self.expiring.add((tenant, context_id))
            case "ready":
                self.ready.add((tenant, context_id))
            case "deleting":
                self.deleting.add((tenant, context_id))
            case "deleted":
                self.deleted.add((tenant, context_id))
            case "wrong":
                self.wrong.append(f"{tenant}/{context_id}: {detail}")
