import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_storage import range_plan
from kvkeep_storage.artifact import CacheDtype, CacheRows, Quantization
from kvkeep_storage.layer_parts import LayerPart, layer_parts
from kvkeep_storage.range_plan import RangeRead, plan_ranges
from kvkeep_storage.slab import encode_slab
from kvkeep_storage.slab_layout import SlabLayout

from ...support.caches import random_rows
from ...support.slabs import empty_layers_like, layout_of

SMALL = 64


def _planned(rows: CacheRows, bands: range) -> tuple[dict[int, SlabLayout], list[LayerPart]]:
    layouts = {band: layout_of(rows, band, encode_slab(rows, band)) for band in bands}
    layers = empty_layers_like(rows, bands.stop)
    return layouts, layer_parts(rows.counts[: bands.stop], layers, bands)


def _reads(layouts: dict[int, SlabLayout], parts: list[LayerPart]) -> list[RangeRead]:
    return [read for run in plan_ranges(layouts, parts) for read in run]


def _bytes_of(read: RangeRead) -> set[tuple[int, int]]:
    return {(read.band, read.start + index) for index in range(read.size_bytes)}


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(("float32", "bfloat16", "float16")),
    num_layers=st.integers(1, 5),
    rows_max=st.integers(0, 9),
    quantization=st.sampled_from(("none", "int4")),
    remainder=st.booleans(),
)
def test_every_byte_behind_the_headers_is_read_exactly_once(
    seed: int,
    dtype: CacheDtype,
    num_layers: int,
    rows_max: int,
    quantization: Quantization,
    remainder: bool,
) -> None:
    rows = random_rows(
        seed,
        dtype=dtype,
        num_layers=num_layers,
        rows_max=rows_max,
        quantization=quantization,
        remainder=remainder,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_plan, "RANGE_BYTES", SMALL)
        reads = _reads(*_planned(rows, range(3)))
    found = [place for read in reads for place in _bytes_of(read)]
    slabs = [encode_slab(rows, band) for band in range(3)]
    expected = {
        (band, index)
        for band, slab in enumerate(slabs)
        for index in range(slab.digests.header_bytes, slab.digests.size_bytes)
    }
    assert len(found) == len(expected)
    assert set(found) == expected


@pytest.mark.parametrize("remainder", [False, True], ids=["", "remainder"])
def test_ranges_are_neither_tiny_nor_huge(monkeypatch: pytest.MonkeyPatch, remainder: bool) -> None:
    monkeypatch.setattr(range_plan, "RANGE_BYTES", SMALL)
    rows = random_rows(rows_max=9, num_layers=3, remainder=remainder)
    sizes = [read.size_bytes for read in _reads(*_planned(rows, range(3)))]
    assert len(sizes) > 10
    # The last one of a slab is what is left of it.
    assert sum(size < SMALL for size in sizes) <= 3
    assert max(sizes) < 2 * SMALL


def test_a_small_slab_is_one_read() -> None:
    reads = _reads(*_planned(random_rows(), range(3)))
    assert [read.band for read in reads] == [0, 1, 2]


def test_low_layers_come_first_in_every_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_plan, "RANGE_BYTES", SMALL)
    counts = np.full((3, 4, 2), 8, np.int32)
    rows = random_rows(counts=counts, num_layers=4)
    runs = plan_ranges(*_planned(rows, range(3)))
    lowest = [min(part.layer for read in run for part in read.parts) for run in runs]
    assert lowest == sorted(lowest)
    layer_1 = {run[0].band for run, layer in zip(runs, lowest, strict=True) if layer == 1}
    assert layer_1 == {0, 1, 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remainder", [False, True], ids=["", "remainder"])
def test_rows_of_a_part_are_read_in_one_run_after_all_else_of_its_band(
    monkeypatch: pytest.MonkeyPatch, remainder: bool, dtype: CacheDtype
) -> None:
    monkeypatch.setattr(range_plan, "RANGE_BYTES", SMALL)
    rows = random_rows(rows_max=9, num_layers=5, dtype=dtype, remainder=remainder)
    runs = plan_ranges(*_planned(rows, range(3)))
    begun: set[int] = set()
    places: dict[LayerPart, set[int]] = {}
    for index, run in enumerate(runs):
        for stretch in (stretch for read in run for stretch in read.stretches):
            if stretch.offset < sum(stretch.part.sizes[:2]):
                assert run[0].band not in begun
            else:
                places.setdefault(stretch.part, set()).add(index)
        begun.add(run[0].band)
    assert all(len(found) == 1 for found in places.values())
    assert len(runs) > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_a_remainder_costs_no_read_of_its_own(
    monkeypatch: pytest.MonkeyPatch, dtype: CacheDtype, quantization: Quantization
) -> None:
    counts = np.full((1, 3, 2), 200, np.int32)
    reads = []
    for remainder in (False, True):
        rows = random_rows(
            counts=counts,
            ratios=(0.1,),
            dtype=dtype,
            quantization=quantization,
            remainder=remainder,
        )
        # What K and V of a layer take together.
        monkeypatch.setattr(range_plan, "RANGE_BYTES", 2 * 400 * rows.row_bytes)
        runs = plan_ranges(*_planned(rows, range(1)))
        assert len(runs) >= 3
        reads.append(sum(len(run) for run in runs))
    # As many, but for what is longer by a few bytes.
    assert reads[1] <= reads[0] + 1


def test_a_missing_part_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_plan, "RANGE_BYTES", SMALL)
    rows = random_rows(num_layers=4)
    layouts, parts = _planned(rows, range(3))
    (wanted,) = (part for part in parts if (part.band, part.layer) == (1, 2))
    reads = _reads(layouts, [wanted])
    assert {part for read in reads for part in read.parts} == {wanted}
    size_bytes = sum(len(view) for views in wanted.tensors for view in views)
    assert len(set().union(*(_bytes_of(read) for read in reads))) == size_bytes
