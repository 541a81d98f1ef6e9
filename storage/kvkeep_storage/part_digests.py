"""Digests of parts while their bytes arrive, each piece in the thread that has just filled it."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence

import xxhash

from kvkeep_storage.layer_parts import LayerPart
from kvkeep_storage.range_plan import RangeRead, Stretch


class PartDigest:
    """xxh3-128 over the bytes of one part in the order of a slab, in whatever order they come.

    What comes too early is digested from where it lies once all before it has come.
    """

    def __init__(self, size_bytes: int) -> None:
        """``size_bytes`` is all that will come."""
        self._size_bytes = size_bytes
        self._state = xxhash.xxh3_128()
        self._done = 0
        self._early: dict[int, list[memoryview]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every byte has come."""
        return self._done == self._size_bytes

    def copy(self) -> "PartDigest":
        """One that goes on from here by itself; everything that was promised must have come."""
        other = PartDigest(self._size_bytes)
        other._state = self._state.copy()
        other._done = self._done
        other._early = self._early.copy()
        return other

    def taking(self, stretch: Stretch) -> Callable[[memoryview], object]:
        """What takes in a stretch, of which nothing came before, view by view.

        A call for each view is most of what a digest costs beside the hashing, so this is the
        hash itself where that can be.
        """
        if stretch.offset != self._done:
            early = self._early[stretch.offset] = []
            return early.append
        self._done += stretch.size_bytes
        return self._state.update

    def catch_up(self) -> None:
        """Take in what came early and is due, once every stretch that was begun has come."""
        while self._early and (views := self._early.pop(self._done, None)) is not None:
            for view in views:
                self._state.update(view)
                self._done += len(view)

    def hexdigest(self) -> str:
        """The digest of what was taken in."""
        return self._state.hexdigest()


class RangeDigests:
    """What one try to read a range adds to the digests of its parts.

    Nothing of it counts before ``commit``: a try that fails, or is given up and still writes,
    leaves no trace. For one try; ``filled`` may be called in any one thread at a time.
    """

    def __init__(self, read: RangeRead, digests: MutableMapping[LayerPart, PartDigest]) -> None:
        """``digests`` are those of everything that was read before; of ``read.parts`` at least."""
        self._read = read
        self._digests = digests
        self._adding: dict[LayerPart, PartDigest] = {}
        self._stretches: Iterator[Stretch] = iter(())
        # Where the next byte belongs, and how many follow it there.
        self._take: Callable[[memoryview], object] = len
        self._rest = 0
        # The byte that must be told of next; None when only a beginning can follow.
        self._next: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all bytes were told of, each after it was last written."""
        return self._next == self._read.start + self._read.size_bytes

    def filled(self, offset: int, views: Sequence[memoryview]) -> None:
        """Implements ``pieces.Filled`` for the buffers of the range."""
        if offset == self._read.start:
            self._adding = {part: self._digests[part].copy() for part in self._read.parts}
            self._stretches = iter(self._read.stretches)
            self._rest = 0
        elif offset != self._next:
            self._next = None
            return
        take, rest = self._take, self._rest
        for view in views:
            if not rest:
                stretch = next(self._stretches)
                take, rest = self._adding[stretch.part].taking(stretch), stretch.size_bytes
            take(view)
            size_bytes = len(view)
            rest -= size_bytes
            offset += size_bytes
        self._take, self._rest = take, rest
        self._next = offset

    def digest_in_place(self) -> None:
        """Digest all bytes from where they lie: for a source that does not tell of them."""
        self.filled(self._read.start, [view for view in self._read.into if view])

    def commit(self) -> list[LayerPart]:
        """Add what was digested to the digests of the parts; return those that are whole now.

        Modifies: ``digests``.
        """
        for digest in self._adding.values():
            digest.catch_up()
        self._digests.update(self._adding)
        return [part for part, digest in self._adding.items() if digest.is_whole]
