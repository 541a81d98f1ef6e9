"""Which ranges of which slabs to read, in which order, and where their bytes go; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

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
    stretches.sort(key=lambda stretch: (stretch.part.band, stretch.start))
    reads = [
        read
        for _, run in groupby(_numbered_runs(stretches), key=lambda numbered: numbered[0])
        for read in _cut([stretch for _, stretch in run])
    ]
    reads.sort(key=lambda read: (min(part.layer for part in read.parts), read.band, read.start))
    return reads


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Bytes that follow each other in a file and have one place in memory."""

    start: int
    view: memoryview
    part: LayerPart


def _stretches(layout: SlabLayout, part: LayerPart) -> Iterator[_Stretch]:
    for start, views in zip(layout.starts[part.layer], part.tensors, strict=True):
        for view in views:
            yield _Stretch(start, view, part)
            start += len(view)


def _numbered_runs(stretches: list[_Stretch]) -> Iterator[tuple[int, _Stretch]]:
    """Give stretches without a gap between them one number."""
    number, band, end = 0, -1, -1
    for stretch in stretches:
        if (stretch.part.band, stretch.start) != (band, end):
            number += 1
        yield number, stretch
        band, end = stretch.part.band, stretch.start + len(stretch.view)


def _cut(run: list[_Stretch]) -> Iterator[RangeRead]:
    """Cut one run into ranges of nearly the same length."""
    size_bytes = sum(len(stretch.view) for stretch in run)
    range_bytes = -(-size_bytes // max(1, size_bytes // RANGE_BYTES))
    start, taken, into, parts = run[0].start, 0, [], {}
    for stretch in run:
        rest = stretch.view
        while rest:
            piece, rest = rest[: range_bytes - taken], rest[range_bytes - taken :]
            into.append(piece)
            parts[id(stretch.part)] = stretch.part
            taken += len(piece)
            if taken == range_bytes:
                yield RangeRead(stretch.part.band, start, tuple(into), tuple(parts.values()))
                start, taken, into, parts = start + taken, 0, [], {}
    if into:
        yield RangeRead(run[0].part.band, start, tuple(into), tuple(parts.values()))
