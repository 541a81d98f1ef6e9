"""A few rows per KV head that stand for all the rows that were evicted from it.

Kept rows alone share out the whole of the attention among themselves. Where a head looked at one
evicted row, that row is lost; but most heads of the first layers look at everything a little, or
at all rows of a kind, and of those only two things matter: how much they weigh together, and
their mean value. So rows that are alike are one cluster, and each cluster leaves one row behind.
Alike are rows to which sampled queries give like logits, and whose values are near each other.

Its value is half the mean of the evicted values, half their mean by the attention that sampled
queries pay to each. Its key is such that its logit comes as near as it can, for the same queries,
to what the evicted rows of the cluster weigh together:

    k = argmin over k of  sum over q of (q . k - log sum exp(q . k_i))^2 + penalty |k - mean k_i|^2

What is lost with a row is then no longer all of its value, but how far that is from its cluster's
mean, and that it was looked at more or less than those: ``Clusters.loss``, by which scores are to
be multiplied before rows are chosen.

Source: ours, k-means and ridge regression. That the weight of each head should be kept, by closed
forms over sampled queries, is the idea of Attention Matching (arXiv 2602.16284), which gives every
kept row a bias; rows more need nothing of the kernels. LESS (arXiv 2402.09398) keeps evicted rows
in a low-rank state. How it was found: bench/NOTES.md.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep_kernels.layout import DenseKV, ShapeError

CLUSTERS = 8
"""Rows that stand for the evicted ones of a head."""
RIDGE = 0.01
"""Penalty for leaving the mean key, as a share of the queries' mean square."""
_ROUNDS = 10
_CLUSTERED_ROWS = 512
"""Clusters are found among so many rows, evenly spread; then each row goes to the nearest."""
_WEIGHT_LOSS = 0.3
"""What is lost with a row whose value others have too: in the first layer every repeated word."""
_VALUES_SHARE = 2.0
"""How much more two values count than two keys that are as far apart for their head."""
_BANDS_AT_ONCE = 4
"""Bands are computed by so many, the last of them empty if need be: then what a band leaves is a
few columns of products of one shape, the same bit for bit whatever other bands there are."""
_COLUMNS = _BANDS_AT_ONCE * CLUSTERS
_NUMBERS_AT_ONCE = 4_000_000
"""Bounds each scratch buffer, or it holds one head's rows."""
_LEAST_PENALTY = 1e-6
_TINY = 1e-30


class Clusters(NamedTuple):
    """Which rows of a layer are alike.

    of [num_kv_heads, tokens] uint8, the cluster of each row; loss [num_kv_heads, tokens] fp32, what
    is lost with a row for the attention that it gets: ``_WEIGHT_LOSS``, and the distance of its
    value from the cluster's mean, as a share of the mean length of the layer's values.
    """

    of: Tensor
    loss: Tensor


def cluster_rows(q: Tensor, cache: DenseKV, *, scale: float) -> Clusters:
    """Find the rows of one layer that are alike, head by head.

    Shapes: q [num_q_heads, samples, head_dim], queries such as will read the cache; cache.k
        [num_kv_heads, tokens, head_dim].
    Modifies: nothing. All is fp32. Raises: ShapeError.
    """
    queries = _queries_of_heads(q, cache, scale)
    num_heads, tokens, head_dim = cache.k.shape
    of = torch.empty(num_heads, tokens, dtype=torch.uint8, device=cache.k.device)
    distance = torch.empty(num_heads, tokens, device=cache.k.device)
    total = torch.zeros((), device=cache.k.device)
    together = max(1, _NUMBERS_AT_ONCE // (tokens * 2 * head_dim))
    for first in range(0, num_heads, together):
        some = slice(first, first + together)
        v = cache.v[some].float()
        found = _clustered(_features(queries[some], cache.k[some].float(), v))
        means = _means(found, v)
        of[some] = found
        distance[some] = torch.linalg.vector_norm(v - _chosen(means, found), dim=2)
        total += torch.linalg.vector_norm(v, dim=2).sum()
    usual = total / (num_heads * tokens)
    # Of values that are not finite nothing is far; whoever stores rows refuses them.
    away = torch.nan_to_num(distance / usual.clamp(min=_TINY), posinf=0.0)
    return Clusters(of, away + _WEIGHT_LOSS)


def fit_remainders(
    q: Tensor,
    cache: DenseKV,
    clusters: Tensor,
    positions: Tensor,
    counts: Sequence[Sequence[int]],
    *,
    scale: float,
) -> Tensor:
    """One layer's remainders, for every band.

    Shapes: q and cache as for ``cluster_rows``; clusters [num_kv_heads, tokens] of what that found;
        positions [rows] the kept ones, head after head, each
        head's band after band; counts [bands][num_kv_heads], rows that a band adds.
    Returns [bands, 2, num_kv_heads, CLUSTERS, head_dim] in the cache's dtype, K then V, for what is
        evicted when the bands up to this one are kept. For a cluster of which nothing is evicted
        it has the row that the queries look at least, whose weight then counts once more for each
        such cluster.
    Modifies: nothing. Sums and solutions are fp32. Raises: ShapeError.
    """
    queries = _queries_of_heads(q, cache, scale)
    num_heads, tokens, head_dim = cache.k.shape
    if clusters.shape != (num_heads, tokens):
        raise ShapeError("clusters", tuple(clusters.shape), (num_heads, tokens))
    lengths = [sum(head) for head in zip(*counts, strict=True)]
    if len(lengths) != num_heads or sum(lengths) != len(positions):
        raise ShapeError("counts", lengths, f"{num_heads} adding to {len(positions)}")
    device, bands = cache.k.device, len(counts)
    size = (bands, 2, num_heads, CLUSTERS, head_dim)
    found = torch.empty(size, dtype=cache.k.dtype, device=device)
    kept_by = _bands_that_keep(positions.to(device), counts, lengths, tokens)
    together = max(1, _NUMBERS_AT_ONCE // (tokens * max(_COLUMNS, queries.shape[1])))
    for first in range(0, num_heads, together):
        some = slice(first, first + together)
        k, v = cache.k[some].float(), cache.v[some].float()
        found[:, :, some] = _of_heads(
            queries[some], k, v, clusters[some], kept_by[some], bands, found.dtype
        )
    return found


def _queries_of_heads(q: Tensor, cache: DenseKV, scale: float) -> Tensor:
    """All queries that read a KV head, scaled: [num_kv_heads, queries, head_dim] fp32."""
    num_heads, _, head_dim = cache.k.shape
    if q.ndim != 3 or q.shape[0] % num_heads or q.shape[2] != head_dim or not q.shape[1]:
        raise ShapeError("q", tuple(q.shape), f"a multiple of {num_heads} heads of {head_dim}")
    return q.float().reshape(num_heads, -1, head_dim) * scale


def _bands_that_keep(
    positions: Tensor, counts: Sequence[Sequence[int]], lengths: Sequence[int], tokens: int
) -> Tensor:
    """The band that keeps each token [num_kv_heads, tokens]; behind the last where none does."""
    device, heads = positions.device, len(lengths)
    rows = torch.tensor(counts, device=device).T.flatten()
    bands = torch.arange(len(counts), device=device).repeat(heads)
    head = torch.arange(heads, device=device).repeat_interleave(len(counts))
    kept_by = torch.full((heads, tokens), len(counts), device=device)
    size = len(positions)
    kept_by[head.repeat_interleave(rows, output_size=size), positions] = bands.repeat_interleave(
        rows, output_size=size
    )
    return kept_by


def _of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    clusters: Tensor,
    kept_by: Tensor,
    bands: int,
    dtype: torch.dtype,
) -> Tensor:
    """Remainders of some heads, [bands, 2, heads, CLUSTERS, d].

    Shapes: q [heads, samples, d], scaled; k, v [heads, tokens, d] fp32; clusters, kept_by as above.
    """
    heads, _, width = k.shape
    evicted = [
        _evicted(clusters, kept_by, first).float() for first in range(0, bands, _BANDS_AT_ONCE)
    ]
    seen = _seen(q, k, evicted)
    factor = _factor(q)
    place = (k @ q.mean(dim=1)[:, :, None]).argmin(dim=1)[:, :, None].expand(-1, 1, width)
    least = torch.stack([k.gather(1, place), v.gather(1, place)])
    found = []
    for members, weights in zip(evicted, seen.weights, strict=True):
        number = members.sum(dim=2, keepdim=True)
        looked_at = members * seen.attention
        paid = looked_at.sum(dim=2, keepdim=True)
        mean_k = members @ k / number.clamp(min=1)
        mean_v = members @ v / number.clamp(min=1)
        # Where nobody looks, no query tells rows apart.
        seen_v = torch.where(paid > _TINY, looked_at @ v / paid.clamp(min=_TINY), mean_v)
        value = (mean_v + seen_v) / 2
        missed = weights - q @ mean_k.mT
        key = mean_k + torch.cholesky_solve(q.mT @ missed, factor).mT
        fits = (key.abs() <= torch.finfo(dtype).max).all(dim=2, keepdim=True)
        rows = torch.stack([torch.where(fits, key, mean_k), value])
        rows = torch.where(number > 0, rows, least)
        found.append(rows.view(2, heads, _BANDS_AT_ONCE, CLUSTERS, width).permute(2, 0, 1, 3, 4))
    return torch.cat(found)[:bands]


def _evicted(clusters: Tensor, kept_by: Tensor, first: int) -> Tensor:
    """Whether a band, of those from ``first`` on, evicts a token, and it is of a cluster.

    Shapes: clusters, kept_by [heads, tokens]. Returns bool [heads, bands x clusters, tokens].
    """
    bands = torch.arange(first, first + _BANDS_AT_ONCE, device=kept_by.device)[:, None, None]
    cluster = torch.arange(CLUSTERS, device=kept_by.device)[:, None]
    gone = (kept_by[:, None, None] > bands) & (clusters[:, None, None] == cluster)
    return gone.flatten(1, 2)


class _Seen(NamedTuple):
    """How queries see keys.

    weights, for each of the evicted sets [heads, samples, bands x clusters]: the log-sum-exp over
    its keys; attention [heads, 1, tokens]: what all queries pay to a key.
    """

    weights: list[Tensor]
    attention: Tensor


def _seen(q: Tensor, k: Tensor, evicted: Sequence[Tensor]) -> _Seen:
    """Queries [heads, samples, d] over keys [heads, tokens, d]; evicted as ``_evicted`` says."""
    weights: list[list[Tensor]] = [[] for _ in evicted]
    attention = torch.zeros(len(k), 1, k.shape[1], device=q.device)
    for some in q.split(max(1, _NUMBERS_AT_ONCE // (len(k) * k.shape[1])), dim=1):
        logits = some @ k.mT
        highest = logits.amax(dim=2, keepdim=True)
        shares = logits.sub_(highest).exp_()
        attention += shares.sum(dim=2)[:, None].reciprocal() @ shares
        for parts, members in zip(weights, evicted, strict=True):
            parts.append((shares @ members.mT).clamp(min=_TINY).log() + highest)
    return _Seen([torch.cat(parts, dim=1) for parts in weights], attention)


def _factor(q: Tensor) -> Tensor:
    """Lower triangular L [heads, d, d] with L L^T = q^T q + penalty, of queries [heads, n, d]."""
    square = q.mT @ q
    diagonal = square.diagonal(dim1=1, dim2=2).mean(dim=1)
    penalty = (RIDGE * diagonal).clamp(min=_LEAST_PENALTY)[:, None, None]
    identity = torch.eye(q.shape[2], device=q.device)
    # Not LU: of several wide matrices on several threads of a CPU torch's hangs, or is wrong.
    found = torch.linalg.cholesky_ex(square + penalty * identity)
    factor: Tensor = found.L
    # Of numbers that are not finite nothing can be solved; whoever stores rows refuses them.
    return factor.masked_fill_(found.info[:, None, None] > 0, torch.nan)


def _features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What rows are compared by [heads, tokens, 2 d]: their logits for the queries, and values.

    |(k_i - k_j) L|^2 is the sum over queries of the squared difference of the two logits. Both
    halves are scaled to the same variance in a head, before values get their share.
    """
    halves = []
    for rows, share in ((k @ _factor(q), 1.0), (v, _VALUES_SHARE)):
        centred = rows - rows.mean(dim=1, keepdim=True)
        variance = centred.square().sum(dim=2).mean(dim=1)[:, None, None]
        halves.append(centred * (share * variance.clamp(min=_TINY).rsqrt()))
    return torch.cat(halves, dim=2)


def _clustered(rows: Tensor) -> Tensor:
    """The cluster of each row [heads, tokens], by k-means from rows that lie evenly spread."""
    sample = _evenly(rows, min(rows.shape[1], _CLUSTERED_ROWS))
    centres = _evenly(sample, CLUSTERS)
    for _ in range(_ROUNDS):
        nearest = _nearest(sample, centres)
        # A cluster without members stays where it is.
        has_members = _members(nearest).any(dim=2, keepdim=True)
        centres = torch.where(has_members, _means(nearest, sample), centres)
    return _nearest(rows, centres)


def _members(clusters: Tensor) -> Tensor:
    """Whether a row is of a cluster: bool [heads, CLUSTERS, tokens]."""
    return clusters[:, None] == torch.arange(CLUSTERS, device=clusters.device)[:, None]


def _means(clusters: Tensor, rows: Tensor) -> Tensor:
    """Of each cluster's rows [heads, CLUSTERS, d]; zero where there are none."""
    members = _members(clusters).to(rows.dtype)
    return members @ rows / members.sum(dim=2, keepdim=True).clamp(min=1)


def _chosen(means: Tensor, clusters: Tensor) -> Tensor:
    """The mean of each row's cluster [heads, tokens, d]."""
    return means.gather(1, clusters[:, :, None].expand(-1, -1, means.shape[2]))


def _nearest(rows: Tensor, centres: Tensor) -> Tensor:
    return (rows @ centres.mT - centres.square().sum(dim=2)[:, None] / 2).argmax(dim=2)


def _evenly(rows: Tensor, count: int) -> Tensor:
    return rows[:, torch.linspace(0, rows.shape[1] - 1, count, device=rows.device).long()]
