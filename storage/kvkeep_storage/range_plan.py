"""Which ranges of which slabs to read, in which order, and where their bytes go; pure.

Rows are cut between layers where that can be, so that one thread reads all of a part and can
digest it on the way. What else a part has is small: what lies elsewhere in its slab is read first,
and what lies between its K and V, as a remainder of their dtype does, with them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from kvkeep_storage.layer_parts import ROW_TENSORS, LayerPart
from kvkeep_storage.slab_layout import SlabLayout

# Ranges are at least this long, where the slab is, and less than twice as long.
RANGE_BYTES = 8 * 1024 * 1024


class Stretch(NamedTuple):
    """Bytes of one part that follow each other in the file and in the part's digest."""

    part: LayerPart
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class RangeRead:
    """One read: from byte ``start`` of a band's slab into ``into``, one view after the other.

    ``stretches`` say whose bytes these are, in the same order; no view lies in two of them.
    """

    band: int
    start: int
    size_bytes: int
    into: tuple[memoryview, ...]
    stretches: tuple[Stretch, ...]

    @property
    def parts(self) -> list[LayerPart]:
        """Those that get bytes from it."""
        return list(dict.fromkeys(stretch.part for stretch in self.stretches))


Run: TypeAlias = tuple[RangeRead, ...]
"""Reads of one band that are made one after the other: what a part has in one of them is
digested before what it has in the next."""


def plan_ranges(layouts: Mapping[int, SlabLayout], parts: Sequence[LayerPart]) -> list[Run]:
    """Cut what the parts need into ranges, so that low layers are complete early in all bands.

    Every byte of every part lies in exactly one range, and no other byte does. The first run of
    a band has whatever does not lie at K and V of all its parts: the others' digests go on from
    there.
    ``layouts`` is by band.
    """
    runs: list[Run] = []
    for band, layout in layouts.items():
        spans = [span for part in parts if part.band == band for span in _spans(layout, part)]
        if not spans:
            continue
        spans.sort(key=_START)
        if sum(span.size_bytes for span in spans) < 2 * RANGE_BYTES:
            runs.append(tuple(_ranges(band, spans)))
            continue
        others = [span for span in spans if not span.is_at_rows]
        runs += _runs(band, others, [span for span in spans if span.is_at_rows])
    # A stable sort: the first run of a band stays its first.
    runs.sort(key=lambda run: min(stretch.part.layer for read in run for stretch in read.stretches))
    return runs


class _Span(NamedTuple):
    """One tensor of a part, where the file has it. ``offset`` is in the part's digest."""

    start: int
    size_bytes: int
    part: LayerPart
    offset: int
    views: Sequence[memoryview]
    is_at_rows: bool

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


_START = attrgetter("start")


def _spans(layout: SlabLayout, part: LayerPart) -> Iterator[_Span]:
    offset = 0
    starts = layout.starts[part.layer]
    k_start, v_start = (starts[index] for index in ROW_TENSORS)
    for index, (start, size_bytes, views) in enumerate(
        zip(starts, part.sizes, part.tensors, strict=True)
    ):
        if size_bytes:
            is_at_rows = index in ROW_TENSORS or k_start <= start < v_start
            yield _Span(start, size_bytes, part, offset, views, is_at_rows)
        offset += size_bytes


def _runs(band: int, others: list[_Span], rows: list[_Span]) -> Iterator[Run]:
    """Behind what lies elsewhere, gather the rows of whole layers into ranges."""
    layers = [list(found) for _, found in groupby(rows, key=attrgetter("part"))]
    gathered, size_bytes = others, sum(span.size_bytes for span in others)
    for layer in layers:
        layer_bytes = sum(span.size_bytes for span in layer)
        # Half-way between the limits: each range costs a round trip, and the last ones idle cores.
        is_full = size_bytes >= 1.5 * RANGE_BYTES or size_bytes + layer_bytes >= 2 * RANGE_BYTES
        if gathered and is_full:
            yield tuple(_ranges(band, gathered))
            gathered, size_bytes = [], 0
        gathered = gathered + layer
        size_bytes += layer_bytes
    yield tuple(_ranges(band, gathered))


def _ranges(band: int, spans: Iterable[_Span]) -> Iterator[RangeRead]:
    """Read tensors in this order, those that follow each other in the file together."""
    together: list[_Span] = []
    for span in spans:
        if together and together[-1].end != span.start:
            yield from _cut(band, together)
            together = []
        together.append(span)
    if together:
        yield from _cut(band, together)


def _cut(band: int, spans: Sequence[_Span]) -> Iterator[RangeRead]:
    """Cut what lies together into ranges of nearly the same length."""
    start, size_bytes = spans[0].start, spans[-1].end - spans[0].start
    range_bytes = -(-size_bytes // max(1, size_bytes // RANGE_BYTES))
    into: list[memoryview] = []
    stretches: list[Stretch] = []
    room = range_bytes
    for span in spans:
        offset, rest, views = span.offset, span.size_bytes, span.views
        while rest:
            fill = min(room, rest)
            here, views = (views, ()) if fill == rest else _split(views, fill)
            into += here
            stretches.append(Stretch(span.part, offset, fill))
            offset, rest, room = offset + fill, rest - fill, room - fill
            if not room:
                yield RangeRead(band, start, range_bytes, tuple(into), tuple(stretches))
                start, room = start + range_bytes, range_bytes
                into, stretches = [], []
    if into:
        yield RangeRead(band, start, range_bytes - room, tuple(into), tuple(stretches))


def _split(
    views: Sequence[memoryview], size_bytes: int
) -> tuple[list[memoryview], list[memoryview]]:
    """The first bytes, and the rest."""
    first: list[memoryview] = []
    for index, view in enumerate(views):
        if len(view) >= size_bytes:
            first.append(view[:size_bytes])
            rest = [view[size_bytes:]] if len(view) > size_bytes else []
            return first, [*rest, *views[index + 1 :]]
        first.append(view)
        size_bytes -= len(view)
    return first, []
