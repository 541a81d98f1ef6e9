"""The smallest ratio within a loss: what has to be measured for it, and when it is known."""

import pytest

from kvkeep_service.auto_ratio import (
    Found,
    Unmeasured,
    Unreachable,
    smallest_trusted,
    smallest_within,
)
from kvkeep_service.known_ratio import ratio_by
from kvkeep_storage.fidelity import Fidelity, RatioFidelity

from ..storage.samples import a_cache, a_context

CANDIDATES = (0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_LOST = (0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.008, 0.005, 0.001, 0.0)
LOSSES = dict(zip(CANDIDATES, _LOST, strict=True))


@pytest.mark.parametrize("limit", [0.3, 0.2, 0.15, 0.06, 0.03, 0.015, 0.005, 0.0005, 0.0])
def test_the_search_finds_the_smallest_ratio_by_few_measurements(limit: float) -> None:
    known = {1.0: 0.0}
    measured = 0
    while isinstance(found := smallest_within(CANDIDATES, known, limit), Unmeasured):
        known[found.ratio] = LOSSES[found.ratio]
        measured += 1
    assert found == Found(min(ratio for ratio, loss in LOSSES.items() if loss <= limit))
    assert measured <= 4


def test_the_usual_ratio_is_measured_first() -> None:
    assert smallest_within(CANDIDATES, {1.0: 0.0}, 0.1) == Unmeasured(0.3)
    assert smallest_within(CANDIDATES, {}, 0.1) == Unmeasured(0.3)


def test_the_next_to_be_measured_is_the_smallest_that_may_be_expected_within() -> None:
    known = {0.3: 0.09, 1.0: 0.0}
    assert smallest_within(CANDIDATES, known, 0.05) == Unmeasured(0.4)
    assert smallest_within(CANDIDATES, known, 0.02) == Unmeasured(0.6)
    assert smallest_within(CANDIDATES, known, 1.0) == Unmeasured(0.15)
    assert smallest_within(CANDIDATES, {0.3: 0.03, 1.0: 0.0}, 0.07) == Unmeasured(0.2)
    # None may be: then the one that comes nearest.
    assert smallest_within(CANDIDATES, {0.3: 0.03, 1.0: 0.0}, 0.04) == Unmeasured(0.2)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1.0: 0.0}, 1.0),
        ({}, None),
        ({1.0: 0.2}, None),
        # On the line from 0.3 to 1.0, 0.7 has three sevenths of 0.1 and 0.6 has four.
        ({0.3: 0.1, 1.0: 0.0}, 0.7),
        ({0.3: 0.1, 0.4: 0.055, 1.0: 0.0}, 0.5),
        ({0.3: 0.04, 1.0: 0.0}, 0.3),
        # Nothing bounds what lies below all that was measured, or above.
        ({0.3: 0.0, 1.0: 0.0}, 0.3),
        ({0.3: 0.2, 0.4: 0.1}, None),
        # What was measured counts, whatever was above it.
        ({0.3: 0.01, 0.4: 0.3, 1.0: 0.0}, 0.3),
    ],
)
def test_what_was_not_measured_is_bounded_by_its_neighbours(
    losses: dict[float, float], expected: float | None
) -> None:
    assert smallest_trusted(CANDIDATES, losses, 0.05) == expected


def test_what_no_ratio_reaches_is_said() -> None:
    losses = dict.fromkeys(CANDIDATES, 0.5)
    assert smallest_within(CANDIDATES, losses, 0.1) == Unreachable(1.0, 0.5)


def measured(**losses: float) -> Fidelity:
    ratios = (
        RatioFidelity(float(name[1:]) / 100, 0.5 + loss, 0.9, 0.0) for name, loss in losses.items()
    )
    return Fidelity(spans=2, tokens=72, nll_full=0.5, ratios=tuple(ratios))


@pytest.mark.parametrize(
    ("fidelity", "expected"),
    [
        (None, None),
        (measured(_15=0.2, _20=0.1, _30=0.01), 0.3),
        (measured(_15=0.01), 0.15),
        # Whether less would do was never measured: a search would have begun at 0.3.
        (measured(_40=0.01), None),
        (measured(_15=0.3, _40=0.01), None),
        # A search that has ended there: the line from 0.3 to 1.0 has 0.05 at 0.6, not stored.
        (measured(_30=0.0875), None),
        # A search that has ended at 0.3; 0.2 is on no line.
        (measured(_20=0.2, _30=0.04), 0.3),
        # It would do, but nothing is stored up to there.
        (measured(_15=0.2, _20=0.2, _30=0.2, _40=0.01), None),
    ],
    ids=[
        "unmeasured",
        "decided",
        "lowest",
        "open below",
        "not a search",
        "line",
        "searched",
        "not stored",
    ],
)
def test_a_committed_cache_decides_only_what_it_has_measured_and_stored(
    fidelity: Fidelity | None, expected: float | None
) -> None:
    context = a_context(ratio=1.0, ratio_from=0.15, max_loss=0.05)
    assert ratio_by(a_cache(fidelity=fidelity), context, CANDIDATES) == expected


@pytest.mark.parametrize(("remainder", "expected"), [(True, 0.15), (False, None)])
def test_where_evicted_rows_leave_remainders_fewer_standard_errors_count(
    remainder: bool, expected: float | None
) -> None:
    at = RatioFidelity(0.15, 0.54, 0.9, loss_error=0.007)
    cache = a_cache(fidelity=Fidelity(spans=2, tokens=72, nll_full=0.5, ratios=(at,)))
    context = a_context(ratio=1.0, ratio_from=0.15, max_loss=0.05, remainder=remainder)
    assert ratio_by(cache, context, CANDIDATES) == expected


def test_quantised_rows_are_not_taken_for_exact_ones() -> None:
    ratios = (*a_cache().ratios, 1.0)
    cache = a_cache(fidelity=measured(_90=0.5), ratios=ratios, ratio=1.0)
    plain = a_context(ratio=1.0, ratio_from=0.15, max_loss=0.05)
    quantised = a_context(ratio=1.0, ratio_from=0.15, max_loss=0.05, quantization="int4")
    assert ratio_by(cache, plain, CANDIDATES) == 1.0
    assert ratio_by(cache, quantised, CANDIDATES) is None
