"""What an object store must be able to do: the few operations under ``Objects``.

A backend has no deadlines and no errors of its own. It raises FileNotFoundError for an object
that is not there, FileExistsError where it was to be absent, EOFError for an object that ends
before a read does, OSError with ENOSPC, EDQUOT or EFBIG when there is no space, and OSError
for all other trouble.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvkeep_storage.pieces import Filled


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object; ``modified_at`` is epoch seconds by the store's clock."""

    key: str
    size_bytes: int
    modified_at: float


class RemoteTrouble(OSError):
    """A server failed, refused or could not be reached."""

    def __init__(self, reason: str, *, attempts: int) -> None:
        """``attempts``: how often it was asked; ``retries.ATTEMPTS`` where more is no use."""
        super().__init__(reason)
        self.attempts = attempts


class Backend(Protocol):
    """One object store; keys are relative to it."""

    @property
    def location(self) -> str:
        """Where it is, for people; without credentials."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether every read goes over a network."""
        ...

    async def put(self, key: str, content: bytes) -> None:
        """Store an object over whatever is there, whole or not at all."""
        ...

    async def put_if_absent(self, key: str, content: bytes) -> None:
        """Store a small object unless there is one."""
        ...

    async def get(self, key: str) -> bytes:
        """Read an object whole."""
        ...

    async def read(
        self, key: str, start: int, into: Sequence[memoryview], on_filled: Filled | None = None
    ) -> None:
        """Fill buffers, one after the other, from ``start`` on. Modifies: ``into``.

        ``on_filled`` hears of every piece, in a helper thread, right after it was filled.
        """
        ...

    async def size(self, key: str) -> int:
        """Size of an object in bytes."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an object; one that is missing counts as removed."""
        ...

    def pages(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """Every object below a directory, a page at a time."""
        ...

    async def delete_temporary_files(self, older_than_seconds: float) -> list[int]:
        """Remove what crashed writes left in plain sight; return the size of each."""
        ...
