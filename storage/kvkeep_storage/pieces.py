"""Buffers that are filled a piece at a time, and who looks at a piece as soon as it is there.

Bytes that have just been written lie in the cache of the core that wrote them: to digest them
there costs a third of what it costs once they have left it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

PIECE_BYTES: Final = 256 * 1024
"""At most so much is filled between two looks: a core's own cache holds it, and where it came
from, beside what else is at work."""

# The most buffers that one read may fill.
_VIEWS_MAX: Final = os.sysconf("SC_IOV_MAX")

Filled: TypeAlias = Callable[[int, Sequence[memoryview]], None]
"""Hears which buffers hold the bytes of an object from an offset on, in the thread that filled
them, so nothing here may wait. Whoever fills buffers tells of all of them in rising order. When
bytes may have been written once more, of another source or in another try, all are told of again
from the first on."""


def pieces(into: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut buffers of bytes into pieces of at most ``PIECE_BYTES``; empty ones are left out."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for buffer in into:
        rest = buffer
        while len(rest) >= room:
            piece.append(rest[:room])
            yield piece
            rest = rest[room:]
            piece, room = [], PIECE_BYTES
        if rest:
            piece.append(rest)
            room -= len(rest)
        if len(piece) == _VIEWS_MAX:
            yield piece
            piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def scatter(
    content: memoryview, into: Sequence[memoryview], start: int, on_filled: Filled | None
) -> None:
    """Copy bytes to where they belong; they are those of an object from ``start`` on.

    By numpy, which lets other threads run meanwhile. Modifies: ``into``; ``on_filled`` hears of
    each piece.
    """
    source = np.frombuffer(content, np.uint8)
    done = 0
    for piece in pieces(into):
        offset = start + done
        for view in piece:
            np.frombuffer(view, np.uint8)[:] = source[done : done + len(view)]
            done += len(view)
        if on_filled is not None:
            on_filled(offset, piece)
