"""Which ranges of which slabs to read, in which order, and where their bytes go; pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from kvkeep_storage.layer_parts import LayerPart
from kvkeep_storage.slab_layout import SlabLayout

# Ranges are at least this long, where the slab is, and less than twice as long.
RANGE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class RangeRead:
    """One read: from byte ``start`` of a band's slab into ``into``, one view after the other.

    ``parts`` are those that get bytes from it.
    """

    band: int
    start: int
    into: tuple[memoryview, ...]
    parts: tuple[LayerPart, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes it reads."""
        return sum(len(view) for view in self.into)


def plan_ranges(layouts: Mapping[int, SlabLayout], parts: Sequence[LayerPart]) -> list[RangeRead]:
    """Cut what the parts need into ranges, so that low layers are complete early in all bands.

    Every byte of every part lies in exactly one range, and no other byte does.
    ``layouts`` is by band.
    """
    stretches = [stretch for part in parts for stretch in _stretches(layouts[part.band], part)]
    stretches.sort(key=itemgetter(0, 1))
    reads = [read for run in _runs(stretches) for read in _cut(run)]
    reads.sort(key=lambda read: (min(part.layer for part in read.parts), read.band, read.start))
    return reads


# Bytes that follow each other in a file and have one place in memory: band, first byte, view,
# part. A plain tuple, because there are thousands before the first byte is read.
_Stretch: TypeAlias = tuple[int, int, memoryview, LayerPart]


def _stretches(layout: SlabLayout, part: LayerPart) -> Iterator[_Stretch]:
    for start, views in zip(layout.starts[part.layer], part.tensors, strict=True):
        for view in views:
            yield part.band, start, view, part
            start += len(view)


def _runs(stretches: Iterable[_Stretch]) -> Iterator[list[_Stretch]]:
    """Cut where there is a gap, or another band begins."""
    run: list[_Stretch] = []
    expected = (-1, -1)
    for stretch in stretches:
        band, start, view, _ = stretch
        if run and (band, start) != expected:
            yield run
            run = []
        run.append(stretch)
        expected = (band, start + len(view))
    if run:
        yield run


def _cut(run: list[_Stretch]) -> Iterator[RangeRead]:
    """Cut one run into ranges of nearly the same length."""
    band, start, _, _ = run[0]
    size_bytes = sum(len(view) for _, _, view, _ in run)
    range_bytes = -(-size_bytes // max(1, size_bytes // RANGE_BYTES))
    room = range_bytes
    into: list[memoryview] = []
    # In the order in which they were met; only the keys matter.
    parts: dict[LayerPart, None] = {}
    for _, _, view, part in run:
        while len(view) >= room:
            into.append(view[:room])
            parts[part] = None
            yield RangeRead(band, start, tuple(into), tuple(parts))
            start, view = start + range_bytes, view[room:]
            room, into, parts = range_bytes, [], {}
        if view:
            into.append(view)
            parts[part] = None
            room -= len(view)
    if into:
        yield RangeRead(band, start, tuple(into), tuple(parts))
