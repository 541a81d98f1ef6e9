"""Remainders weigh about what the evicted rows weigh together, and have their mean value."""

import pytest
import torch
from torch import Tensor

from kvkeep_kernels import remainder
from kvkeep_kernels.layout import DenseKV, ShapeError
from kvkeep_kernels.remainder import CLUSTERS, cluster_rows, fit_remainders

HEADS, GROUP, TOKENS, WIDTH, SCALE = 2, 3, 60, 8, 0.5
COUNTS = [[5, 10], [15, 40]]
"""Two bands; the second head keeps 50 of its 60 rows."""


def look_at_everything(seed: int = 0) -> tuple[Tensor, DenseKV]:
    """Queries with a direction in common, as those of models have, and keys that differ little."""
    torch.manual_seed(seed)
    q = torch.randn(HEADS * GROUP, 40, WIDTH) * 0.3 + torch.randn(WIDTH)
    return q, DenseKV(torch.randn(HEADS, TOKENS, WIDTH) * 0.3, torch.randn(HEADS, TOKENS, WIDTH))


def kept_positions(seed: int = 1) -> list[Tensor]:
    """Of each head, in the order of keeping."""
    torch.manual_seed(seed)
    lengths = [sum(head) for head in zip(*COUNTS, strict=True)]
    return [torch.randperm(TOKENS)[:length] for length in lengths]


def evicted(kept: Tensor) -> Tensor:
    """The other positions of a head."""
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[kept] = False
    return mask.nonzero().flatten()


def fit(
    q: Tensor, cache: DenseKV, positions: Tensor, counts: list[list[int]], scale: float = SCALE
) -> Tensor:
    clusters = cluster_rows(q, cache, scale=scale).of
    return fit_remainders(q, cache, clusters, positions, counts, scale=scale)


def fitted(q: Tensor, cache: DenseKV, runs: list[Tensor]) -> Tensor:
    return fit(q, cache, torch.cat(runs), COUNTS)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(SCALE * q @ k.T, dim=-1) @ v


def own_queries(q: Tensor, head: int) -> Tensor:
    """All queries that read a KV head, scaled."""
    return q[head * GROUP : (head + 1) * GROUP].flatten(0, 1) * SCALE


def clusters(q: Tensor, cache: DenseKV, head: int) -> list[Tensor]:
    """Which rows of a head are alike, straightforwardly: by their logits and their values."""

    def even(rows: Tensor) -> Tensor:
        rows = rows - rows.mean(dim=0)
        return rows / rows.square().sum(dim=1).mean().sqrt()

    own = own_queries(q, head)
    logits = cache.k[head] @ own.T
    rows = torch.cat([even(logits), 2 * even(cache.v[head])], dim=1)
    centres = rows[torch.linspace(0, len(rows) - 1, CLUSTERS).long()]
    for _ in range(10):
        nearest = torch.cdist(rows, centres).argmin(dim=1)
        centres = torch.stack(
            [
                rows[nearest == n].mean(dim=0) if (nearest == n).any() else centres[n]
                for n in range(CLUSTERS)
            ]
        )
    return [(nearest == number).nonzero().flatten() for number in range(CLUSTERS)]


@pytest.mark.parametrize("head", [0, 1])
def test_rows_are_alike_by_their_logits_and_their_values(
    head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Logits are those that keys give without the penalty, to the last bits.
    monkeypatch.setattr(remainder, "RIDGE", 1e-7)
    q, cache = look_at_everything()
    found = cluster_rows(q, cache, scale=SCALE).of[head]
    for number, members in enumerate(clusters(q, cache, head)):
        assert (found == number).nonzero().flatten().tolist() == members.tolist()


def test_what_is_lost_with_a_row_is_its_values_distance_from_those_like_it_and_a_constant() -> None:
    q, cache = look_at_everything()
    found = cluster_rows(q, cache, scale=SCALE)
    usual = cache.v.norm(dim=2).mean()
    for head in range(HEADS):
        for number in range(CLUSTERS):
            members = (found.of[head] == number).nonzero().flatten()
            values = cache.v[head, members]
            away = (values - values.mean(dim=0)).norm(dim=1) / usual + 0.3
            torch.testing.assert_close(found.loss[head, members], away, rtol=1e-4, atol=1e-5)


def test_with_a_row_whose_value_all_others_have_something_is_lost() -> None:
    q, cache = look_at_everything()
    for value in (cache.v[:, :1].clone(), torch.zeros(1)):
        cache.v[:] = value
        loss = cluster_rows(q, cache, scale=SCALE).loss
        torch.testing.assert_close(loss, torch.full((HEADS, TOKENS), 0.3))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_lost_is_a_number_even_where_values_are_none(wrong: float) -> None:
    q, cache = look_at_everything()
    cache.v[0, 3] = wrong
    assert torch.isfinite(cluster_rows(q, cache, scale=SCALE).loss).all()


@pytest.mark.parametrize(("band", "head"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_each_row_stands_for_what_its_band_evicts_of_one_cluster(band: int, head: int) -> None:
    q, cache = look_at_everything()
    run = kept_positions()[head]
    found = fitted(q, cache, kept_positions())
    kept = run[: sum(COUNTS[b][head] for b in range(band + 1))]
    own = own_queries(q, head)
    alike = cluster_rows(q, cache, scale=SCALE).of[head]
    attention = torch.softmax(own @ cache.k[head].T, dim=1).sum(dim=0)
    seen = 0
    for number in range(CLUSTERS):
        gone = evicted(kept)[alike[evicted(kept)] == number]
        if not len(gone):
            continue
        seen += 1
        by_attention = attention[gone] @ cache.v[head, gone] / attention[gone].sum()
        value = (cache.v[head, gone].mean(dim=0) + by_attention) / 2
        torch.testing.assert_close(found[band, 1, head, number], value, rtol=1e-4, atol=1e-5)
        weights = torch.logsumexp(own @ cache.k[head, gone].T, dim=1)
        missed = (own @ found[band, 0, head, number] - weights).abs().mean()
        mean_key = cache.k[head, gone].mean(dim=0)
        if len(gone) > 1:
            assert missed < 0.2 * (own @ mean_key - weights).abs().mean()
    assert seen >= 2


def test_attention_with_it_is_much_nearer_to_attention_over_every_row() -> None:
    q, cache = look_at_everything()
    runs = kept_positions()
    found = fitted(q, cache, runs)
    unseen = look_at_everything(seed=0)[0][:GROUP] + 0.1 * torch.randn(GROUP, 40, WIDTH)
    everything = attended(unseen, cache.k[0], cache.v[0])
    k, v = cache.k[0, runs[0][:5]], cache.v[0, runs[0][:5]]
    alone = attended(unseen, k, v)
    both = attended(unseen, torch.cat([k, found[0, 0, 0]]), torch.cat([v, found[0, 1, 0]]))
    assert (both - everything).norm() < 0.3 * (alone - everything).norm()


def test_a_band_has_the_same_one_whatever_other_bands_there_are() -> None:
    q, cache = look_at_everything()
    runs = kept_positions()
    both = fitted(q, cache, runs)
    firsts = [run[:count] for run, count in zip(runs, COUNTS[0], strict=True)]
    alone = fit(q, cache, torch.cat(firsts), COUNTS[:1])
    assert torch.equal(both[:1], alone)


def test_more_bands_than_are_computed_at_once_have_each_their_own() -> None:
    q, cache = look_at_everything()
    runs = [run[:20] for run in kept_positions()]
    counts = [[2, 2]] * 10
    every = fit(q, cache, torch.cat(runs), counts)
    for number in range(1, 11):
        firsts = torch.cat([run[: 2 * number] for run in runs])
        kept = fit(q, cache, firsts, [[2 * number] * 2])
        assert torch.equal(every[number - 1], kept[0])


def test_heads_and_queries_in_pieces_give_what_they_give_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, cache = look_at_everything()
    together = fitted(q, cache, kept_positions())
    for numbers in (1, 7 * TOKENS, 300 * TOKENS):
        monkeypatch.setattr(remainder, "_NUMBERS_AT_ONCE", numbers)
        alone = fitted(q, cache, kept_positions())
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)


def test_of_a_head_that_keeps_everything_it_is_the_row_that_is_looked_at_least() -> None:
    q, cache = look_at_everything()
    runs = [torch.randperm(TOKENS), torch.randperm(TOKENS)[:50]]
    found = fit(q, cache, torch.cat(runs), [[20, 10], [40, 40]])
    looking = q[:GROUP].flatten(0, 1).mean(dim=0)
    least = int((cache.k[0] @ looking).argmin())
    for number in range(CLUSTERS):
        assert torch.equal(found[1, 0, 0, number], cache.k[0, least])
        assert torch.equal(found[1, 1, 0, number], cache.v[0, least])
    alike, gone = cluster_rows(q, cache, scale=SCALE).of[0], evicted(runs[0][:20])
    is_least = (found[0, 0, 0] == cache.k[0, least]).all(dim=-1)
    for number in range(CLUSTERS):
        members = gone[alike[gone] == number].tolist()
        assert bool(is_least[number]) == (members in ([], [least]))


def test_rows_that_nobody_looks_at_have_their_mean_value() -> None:
    q, k = torch.zeros(1, 10, WIDTH), torch.zeros(1, 40, WIDTH)
    q[:, :, 0], k[:, :20, 0], k[:, 20:, 0] = 30.0, 30.0, -5.0
    cache = DenseKV(k, torch.ones(1, 40, WIDTH))
    found = fit(q, cache, torch.arange(20), [[20]], scale=1.0)
    torch.testing.assert_close(found[0, 1], torch.ones(1, CLUSTERS, WIDTH))


def test_a_head_with_fewer_evicted_rows_than_clusters_has_its_own_rows() -> None:
    q, cache = look_at_everything()
    runs = [torch.arange(TOKENS - 1), torch.arange(TOKENS)]
    found = fit(q, cache, torch.cat(runs), [[TOKENS - 1, TOKENS]])
    own = own_queries(q, 0)
    logit = own @ cache.k[0, -1]
    near = [(own @ found[0, 0, 0, n] - logit).abs().mean() < 0.01 for n in range(CLUSTERS)]
    assert any(near), "one of the rows weighs what the only evicted one does"
    assert torch.isfinite(found).all()


def test_a_key_that_its_dtype_cannot_hold_is_the_mean_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remainder, "_LEAST_PENALTY", 1e-30)
    q, cache = look_at_everything()
    q = q * 1e-6
    half = DenseKV(cache.k.half(), cache.v.half())
    wide, narrow = (fitted(q, rows, kept_positions()) for rows in (cache, half))
    assert (wide[:, 0].abs() > torch.finfo(torch.float16).max).any()
    assert torch.isfinite(narrow).all()
    # Of each key all numbers are the mean's, not only the one that was too large.
    assert ((narrow[:, 0].abs() <= half.k.abs().max()).all(dim=-1)).any()


def test_rows_that_are_no_numbers_stay_so() -> None:
    q, cache = look_at_everything()
    cache.k[0] = torch.nan
    found = fitted(q, cache, kept_positions())
    assert not torch.isfinite(found[:, 0, 0]).all()
    assert torch.isfinite(found[:, :, 1]).all()


def test_wide_heads_on_several_threads_have_what_they_have_on_one() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(4, 20, 160), torch.randn(4, 40, 160)
    cache = DenseKV(k * 0.1, torch.randn(4, 40, 160))
    counts, kept = [[10] * 4], torch.arange(10).repeat(4)
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(fit(q, cache, kept, counts, scale=0.1))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


def test_queries_of_zero_give_mean_keys() -> None:
    q, cache = look_at_everything()
    found = fitted(torch.zeros_like(q), cache, kept_positions())
    gone = cache.k[0, evicted(kept_positions()[0])]
    for key in found[1, 0, 0]:
        assert (key >= gone.amin(dim=0)).all()
        assert (key <= gone.amax(dim=0)).all()


@pytest.mark.parametrize(
    ("q", "counts", "named"),
    [
        (torch.zeros(3, 4, WIDTH), COUNTS, "q"),
        (torch.zeros(6, 4, WIDTH + 1), COUNTS, "q"),
        (torch.zeros(6, 0, WIDTH), COUNTS, "q"),
        (torch.zeros(6, 4, WIDTH), [[5, 10], [15, 41]], "counts"),
        (torch.zeros(6, 4, WIDTH), [[20, 50, 0]], "counts"),
    ],
)
def test_shapes_that_disagree_are_named(q: Tensor, counts: list[list[int]], named: str) -> None:
    _, cache = look_at_everything()
    clusters = torch.zeros(HEADS, TOKENS, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=f"^{named}"):
        fit_remainders(q, cache, clusters, torch.cat(kept_positions()), counts, scale=SCALE)
    if named == "q":
        with pytest.raises(ShapeError, match=r"^q"):
            cluster_rows(q, cache, scale=SCALE)


def test_clusters_of_other_rows_are_refused() -> None:
    q, cache = look_at_everything()
    clusters = torch.zeros(HEADS, TOKENS - 1, dtype=torch.uint8)
    with pytest.raises(ShapeError, match=r"^clusters"):
        fit_remainders(q, cache, clusters, torch.cat(kept_positions()), COUNTS, scale=SCALE)
