"""Selection keeps exactly the counts asked for, in one total order, whatever the ties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels.compaction import (
    LEAST_SHARE,
    Selection,
    compact,
    keep_all,
    kept_count,
    select,
    shared_out,
)
from kvkeep_kernels.layout import DenseKV, ShapeError
from kvkeep_kernels.reference import total_order

RATIOS = (0.05, 0.1, 0.3, 0.5, 1.0)


def kept(selection: Selection, band: int) -> set[tuple[int, int, int]]:
    """Every (layer, head, position) of the bands up to ``band``."""
    total, upto = selection.counts.sum(0), selection.counts[: band + 1].sum(0)
    found = set()
    for layer, positions in enumerate(selection.positions):
        runs = torch.split(positions, total[layer].tolist())
        for head, run in enumerate(runs):
            found |= {(layer, head, int(p)) for p in run[: upto[layer, head]]}
    return found


@settings(max_examples=60)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 40),
    levels=st.sampled_from([1, 2, 1000]),
    protected_share=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 1000),
)
def test_every_ratio_keeps_the_first_rows_of_the_total_order(
    layers: int, heads: int, tokens: int, levels: int, protected_share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    scores = torch.randint(0, levels, (layers, heads, tokens)) / levels
    protected = torch.rand(tokens) < protected_share
    selection = select(scores, protected, RATIOS)
    order = total_order(scores, protected)
    fixed = {
        (i, h, int(t)) for i in range(layers) for h in range(heads) for t in protected.nonzero()
    }
    if not order:
        assert kept(selection, len(selection.ratios) - 1) == fixed
        return
    eligible = tokens - int(protected.sum())
    for band, ratio in enumerate(RATIOS):
        count = kept_count(ratio, layers * heads, eligible)
        assert kept(selection, band) == fixed | set(order[:count])


def test_massive_ties_keep_the_exact_count_in_layer_head_position_order() -> None:
    selection = select(torch.zeros(2, 2, 100), torch.zeros(100, dtype=torch.bool), (0.3,))
    assert selection.num_selected == 120
    assert selection.ratio_achieved == 0.3
    # Each head's floor first, then heads in order: the first head fills up before the second.
    assert selection.counts[0].flatten().tolist() == [100, 18, 1, 1]


def test_zeros_of_either_sign_are_one_score() -> None:
    scores = torch.zeros(1, 2, 8)
    scores[0, 0, ::2] = -0.0
    selection = select(scores, torch.zeros(8, dtype=torch.bool), (1.0,))
    assert selection.positions[0].tolist() == [*range(8), *range(8)]


def test_rows_stand_in_order_of_importance_behind_the_protected_ones() -> None:
    scores = torch.tensor([[[0.9, 0.1, 0.5, 0.7, 0.2]]])
    protected = torch.tensor([False, True, False, False, True])
    selection = select(scores, protected, (1.0,))
    assert selection.positions[0].tolist() == [1, 4, 0, 3, 2]
    assert selection.num_protected == 2


@pytest.mark.parametrize(
    ("ratio", "tokens", "expected"), [(0.3, 100, 120), (0.001, 100, 4), (0.5, 1, 4), (1.0, 7, 28)]
)
def test_the_count_is_rounded_half_up_and_never_below_a_row_per_head(
    ratio: float, tokens: int, expected: int
) -> None:
    assert kept_count(ratio, 4, tokens) == expected


def test_a_score_that_is_not_finite_is_refused_unless_it_is_protected() -> None:
    scores = torch.zeros(1, 1, 4)
    scores[0, 0, 2] = torch.nan
    with pytest.raises(ShapeError, match=r"^scores: "):
        select(scores, torch.zeros(4, dtype=torch.bool), (0.5,))
    shielded = torch.tensor([False, False, True, False])
    assert select(scores, shielded, (1.0,)).num_selected == 3


@pytest.mark.parametrize("ratios", [(), (0.5, 0.5), (0.5, 0.3), (0.0, 0.5), (0.5, 1.1)], ids=str)
def test_ratios_that_do_not_ascend_within_0_and_1_are_refused(ratios: tuple[float, ...]) -> None:
    with pytest.raises(ShapeError, match=r"^ratios: "):
        select(torch.zeros(1, 1, 4), torch.zeros(4, dtype=torch.bool), ratios)


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3, 0.55, 1.0])
def test_of_scores_shared_out_a_head_keeps_its_best_rows_and_no_less_than_its_share(
    ratio: float,
) -> None:
    torch.manual_seed(0)
    scores = torch.rand(3, 2, 400)
    scores[0] *= 1e-6
    protected = torch.arange(400) < 7
    found = select(shared_out(scores, protected), protected, (ratio,))
    total_heads = 6
    share = found.num_selected / total_heads / LEAST_SHARE
    for layer, positions in enumerate(found.positions):
        lengths = found.counts[0, layer].tolist()
        for head, run in enumerate(positions.split(lengths)):
            own = run[7:]
            assert len(own) >= int(share)
            best = scores[layer, head, 7:].sort(descending=True).indices[: len(own)] + 7
            assert torch.equal(own, best)
    lengths = found.counts[0, 0] - 7
    if ratio < 0.55:
        assert all(int(length) <= share + 1 for length in lengths), "and no more for nothing"


def test_of_scores_shared_out_a_lower_ratio_is_a_prefix_of_a_higher_one() -> None:
    torch.manual_seed(0)
    scores = torch.rand(2, 2, 300) * torch.tensor([1.0, 1e-3])[:, None, None]
    protected = torch.zeros(300, dtype=torch.bool)
    placed = shared_out(scores, protected)
    both = select(placed, protected, (0.2, 0.5))
    alone = select(placed, protected, (0.2,))
    assert torch.equal(both.counts[0], alone.counts[0])
    for layer, positions in enumerate(both.positions):
        runs = positions.split(both.counts[:, layer].sum(dim=0).tolist())
        firsts = [run[:count] for run, count in zip(runs, both.counts[0, layer], strict=True)]
        assert torch.equal(torch.cat(firsts), alone.positions[layer])


def test_scores_that_heads_share_anyway_stay_in_their_order() -> None:
    torch.manual_seed(0)
    scores = torch.rand(2, 3, 200)
    protected = torch.arange(200) % 50 == 0
    placed, plain = (
        select(one, protected, (0.1, 0.4)) for one in (shared_out(scores, protected), scores)
    )
    assert torch.equal(placed.counts, plain.counts)
    assert all(map(torch.equal, placed.positions, plain.positions))


def test_scores_that_are_not_finite_are_not_shared_out() -> None:
    scores = torch.rand(1, 2, 10)
    scores[0, 1, 3] = torch.nan
    protected = torch.zeros(10, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"^scores"):
        shared_out(scores, protected)
    protected[3] = True
    assert torch.isfinite(shared_out(scores, protected)).all()


def test_compact_gathers_the_rows_it_was_told_and_aliases_nothing() -> None:
    torch.manual_seed(1)
    cache = DenseKV(*torch.randn(2, 2, 9, 64))
    positions, length = torch.tensor([3, 0, 8, 1]), torch.tensor([3, 1])
    rows = compact(cache, positions, length)
    assert rows.start.tolist() == [0, 3]
    assert rows.length.tolist() == [3, 1]
    assert torch.equal(rows.k, torch.stack([*cache.k[0, [3, 0, 8]], cache.k[1, 1]]))
    assert torch.equal(rows.v, torch.stack([*cache.v[0, [3, 0, 8]], cache.v[1, 1]]))
    before = rows.k.clone()
    cache.k.zero_()
    assert torch.equal(rows.k, before)


def test_keeping_all_evicts_nothing_and_says_so() -> None:
    selection = keep_all(2, 3, 5, num_protected=2)
    assert selection.counts.tolist() == [[[5, 5, 5], [5, 5, 5]]]
    assert selection.ratio_achieved == 1.0
    assert selection.positions[1].tolist() == [0, 1, 2, 3, 4] * 3
