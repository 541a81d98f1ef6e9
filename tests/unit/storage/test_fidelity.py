"""What was measured of a cache comes back as it was from manifest, record and reindex."""

from dataclasses import replace

import pytest

from kvkeep_storage.errors import Invalid
from kvkeep_storage.fidelity import Fidelity, RatioFidelity

MEASURED = Fidelity(
    spans=2,
    tokens=72,
    nll_full=0.5123456789012345,
    ratios=(RatioFidelity(0.2, 0.6, 0.9, 0.01), RatioFidelity(0.3, 0.55, 0.95, 0.005)),
)


def test_a_record_keeps_every_digit() -> None:
    assert Fidelity.from_json(MEASURED.to_json()) == MEASURED


@pytest.mark.parametrize("text", ["[]", "{}", '{"spans": 1}', '{"ratios": [1]}', "nan"])
def test_what_is_no_fidelity_is_not_read_as_one(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        Fidelity.from_json(text)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"spans": 0}, "spans"),
        ({"tokens": 1}, "tokens"),
        ({"nll_full": float("nan")}, "nll_full"),
        ({"ratios": MEASURED.ratios[::-1]}, "ratios"),
    ],
)
def test_impossible_measurements_are_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(Invalid, match=f"fidelity.{field}"):
        replace(MEASURED, **change)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((0.0, 0.1, 1.0, 0.0), "ratio"),
        ((0.3, -0.1, 1.0, 0.0), "nll_kept"),
        ((0.3, 0.1, 1.1, 0.0), "top1_agreement"),
        ((0.3, 0.1, 1.0, float("inf")), "loss_error"),
    ],
)
def test_impossible_losses_are_refused_by_name(values: tuple[float, ...], field: str) -> None:
    with pytest.raises(Invalid, match=f"fidelity.{field}"):
        RatioFidelity(*values)


def test_what_was_measured_before_is_kept_where_the_same_tokens_were_counted() -> None:
    now = replace(MEASURED, ratios=(RatioFidelity(0.3, 0.56, 0.94, 0.005),))
    both = now.with_those_of(MEASURED)
    assert both.at(0.2) == MEASURED.at(0.2)
    assert both.at(0.3) == now.at(0.3)
    assert now.with_those_of(replace(MEASURED, tokens=36)) == now
    assert now.with_those_of(None) == now


def test_a_loss_is_what_was_measured_beyond_the_full_cache_and_never_below_nothing() -> None:
    better = replace(MEASURED, nll_full=0.58)
    assert MEASURED.loss(0.3) == pytest.approx(0.55 - MEASURED.nll_full)
    assert (better.loss(0.3), better.loss(0.2)) == (0.0, pytest.approx(0.02))
    assert MEASURED.loss(0.25) is None
