"""Digests that are taken on the way are those of the bytes that lie in memory in the end."""

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_storage.layer_parts import LayerPart
from kvkeep_storage.part_digests import PartDigest, RangeDigests
from kvkeep_storage.range_plan import RangeRead, Stretch

START = 100


def _part(layer: int) -> LayerPart:
    return LayerPart(0, layer, np.zeros(1, np.int32), (), ())


class Range:
    """One read that holds all of two parts, the second of them in two stretches, back to front."""

    def __init__(self, views: list[int], seed: int) -> None:
        self.content = bytearray(random.Random(seed).randbytes(3 * sum(views)))
        self.parts = [_part(0), _part(1)]
        size = sum(views)
        self.stretches = (
            Stretch(self.parts[0], 0, size),
            Stretch(self.parts[1], size, size),
            Stretch(self.parts[1], 0, size),
        )
        rest = memoryview(self.content)
        into = []
        for length in views * 3:
            into.append(rest[:length])
            rest = rest[length:]
        self.read = RangeRead(0, START, len(self.content), tuple(into), self.stretches)
        self.digests = {part: PartDigest(size * (part.layer + 1)) for part in self.parts}
        self.size = size

    def expected(self) -> list[str]:
        size, content = self.size, bytes(self.content)
        second = content[2 * size :] + content[size : 2 * size]
        return [xxhash.xxh3_128(part).hexdigest() for part in (content[:size], second)]

    def found(self) -> list[str]:
        return [self.digests[part].hexdigest() for part in self.parts]

    def tell(self, adding: RangeDigests, until: int | None = None) -> None:
        offset = START
        for view in self.read.into[:until]:
            adding.filled(offset, [view])
            offset += len(view)


@pytest.fixture
def whole() -> Range:
    return Range([7, 1, 20], 3)


@given(views=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_pieces_that_are_told_of_in_order_need_no_second_look(views: list[int], seed: int) -> None:
    whole = Range(views, seed)
    adding = RangeDigests(whole.read, whole.digests)
    whole.tell(adding)
    assert adding.is_complete
    assert adding.commit() == whole.parts
    assert whole.found() == whole.expected()


@given(cut=st.integers(0, 8))
def test_what_is_written_again_from_the_beginning_counts_as_it_was_last_told(cut: int) -> None:
    whole = Range([7, 1, 20], 3)
    adding = RangeDigests(whole.read, whole.digests)
    whole.tell(adding, cut)
    whole.content[:] = whole.content[::-1]
    whole.tell(adding)
    assert adding.is_complete
    adding.commit()
    assert whole.found() == whole.expected()


@pytest.mark.parametrize("again", [2, 3, 5])
def test_bytes_that_are_told_of_again_in_the_middle_are_never_believed(
    whole: Range, again: int
) -> None:
    adding = RangeDigests(whole.read, whole.digests)
    whole.tell(adding, 5)
    offset = START + sum(map(len, whole.read.into[: again - 1]))
    for view in whole.read.into[again - 1 :]:
        if again < 5:
            view[0] ^= 1
        adding.filled(offset, [view])
        offset += len(view)
    assert not adding.is_complete
    adding.digest_in_place()
    assert adding.is_complete
    adding.commit()
    assert whole.found() == whole.expected()


@pytest.mark.parametrize("told", [0, 4, 8])
def test_what_was_not_told_to_the_end_is_looked_at_where_it_lies(whole: Range, told: int) -> None:
    adding = RangeDigests(whole.read, whole.digests)
    whole.tell(adding, told)
    assert not adding.is_complete
    whole.content[-1] ^= 1
    adding.digest_in_place()
    assert adding.commit() == whole.parts
    assert whole.found() == whole.expected()


def test_a_try_that_is_not_committed_leaves_no_trace(whole: Range) -> None:
    whole.tell(RangeDigests(whole.read, whole.digests), 4)
    late = RangeDigests(whole.read, whole.digests)
    whole.content[:] = whole.content[::-1]
    adding = RangeDigests(whole.read, whole.digests)
    whole.tell(adding)
    adding.commit()
    # A read that was given up may still tell of what it wrote.
    whole.tell(late)
    assert whole.found() == whole.expected()


def test_a_part_goes_on_from_one_range_to_the_next() -> None:
    part = _part(0)
    content = memoryview(random.Random(1).randbytes(30))
    digests = {part: PartDigest(30)}
    reads = [
        RangeRead(0, start, 10, (content[start : start + 10],), (Stretch(part, start, 10),))
        for start in (0, 10, 20)
    ]
    for read in reads:
        failed = RangeDigests(read, digests)
        failed.filled(read.start, [read.into[0][:3]])
        adding = RangeDigests(read, digests)
        adding.digest_in_place()
        assert adding.commit() == ([part] if read is reads[-1] else [])
    assert digests[part].hexdigest() == xxhash.xxh3_128(content).hexdigest()
