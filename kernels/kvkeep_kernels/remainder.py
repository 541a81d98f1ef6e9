"""A few rows per KV head that stand for all the rows that were evicted from it.

Kept rows alone share out the whole of the attention among themselves. Where a head looked at one
evicted row, that row is lost; but most heads of the first layers look at everything a little, or
at all rows of a kind, and of those only two things matter: how much they weigh together, and
their mean value. So rows with like keys are one cluster, and each cluster leaves one row behind.
Its value is half the mean of the evicted values, half their mean by the attention that sampled
queries pay to each. Its key is such that its logit comes as near as it can, for the same queries,
to what the evicted rows of the cluster weigh together:

    k = argmin over k of  sum over q of (q . k - log sum exp(q . k_i))^2 + penalty |k - mean k_i|^2

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

CLUSTERS = 4
"""Rows that stand for the evicted ones of a head."""
RIDGE = 0.01
"""Penalty for leaving the mean key, as a share of the queries' mean square."""
_ROUNDS = 10
_CLUSTERED_KEYS = 512
"""Clusters are found among so many keys, evenly spread; then each key goes to the nearest."""
_LOGITS_AT_ONCE = 4_000_000
"""Bounds scratch, however long the document is."""
_LEAST_PENALTY = 1e-6
_TINY = 1e-30


def fit_remainders(
    q: Tensor, cache: DenseKV, positions: Tensor, counts: Sequence[Sequence[int]], *, scale: float
) -> Tensor:
    """One layer's remainders, for every band.

    Shapes: q [num_q_heads, samples, head_dim], queries such as will read the cache; cache.k
        [num_kv_heads, tokens, head_dim]; positions [rows] the kept ones, head after head, each
        head's band after band; counts [bands][num_kv_heads], rows that a band adds.
    Returns [bands, 2, num_kv_heads, CLUSTERS, head_dim] in the cache's dtype, K then V, for what is
        evicted when the bands up to this one are kept. For a cluster of which nothing is evicted
        it has the row that the queries look at least, whose weight then counts twice.
    Modifies: nothing. Sums and solutions are fp32. Raises: ShapeError.
    """
    num_heads, tokens, head_dim = cache.k.shape
    if q.ndim != 3 or q.shape[0] % num_heads or q.shape[2] != head_dim or not q.shape[1]:
        raise ShapeError("q", tuple(q.shape), f"a multiple of {num_heads} heads of {head_dim}")
    lengths = [sum(head) for head in zip(*counts, strict=True)]
    if len(lengths) != num_heads or sum(lengths) != len(positions):
        raise ShapeError("counts", lengths, f"{num_heads} adding to {len(positions)}")
    device, bands = cache.k.device, len(counts)
    size = (bands, 2, num_heads, CLUSTERS, head_dim)
    found = torch.empty(size, dtype=cache.k.dtype, device=device)
    queries = q.float().reshape(num_heads, -1, head_dim) * scale
    numbers = torch.arange(bands, device=device)
    for head, (own, run) in enumerate(
        zip(queries, positions.to(device).split(lengths), strict=True)
    ):
        rows = torch.tensor([band[head] for band in counts], device=device)
        # The band that keeps a token; those that no band keeps come behind the last.
        band = torch.full((tokens,), bands, device=device)
        band[run] = torch.repeat_interleave(numbers, rows, output_size=len(run))
        found[:, :, head] = _of_head(
            own, cache.k[head].float(), cache.v[head].float(), band, bands, found.dtype
        )
    return found


def _of_head(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, bands: int, dtype: torch.dtype
) -> Tensor:
    """Remainders of one head, [bands, 2, CLUSTERS, d].

    Shapes: q [samples, d], scaled; k, v [tokens, d] fp32; band [tokens], which of ``bands`` keeps
        a token, or ``bands``. What a band leaves is the same, bit for bit, whatever other bands
        there are: clusters are of all tokens, and each band's products are of one shape.
    """
    clusters = torch.nn.functional.one_hot(_clustered(k), CLUSTERS).to(k.dtype)
    evicted = [clusters * (band > kept)[:, None] for kept in range(bands)]
    seen = _seen(q, k, evicted)
    square = q.T @ q
    penalty = (RIDGE * square.diagonal().mean()).clamp(min=_LEAST_PENALTY)
    damped = square + penalty * torch.eye(len(square), device=q.device)
    least = (q.mean(dim=0) @ k.T).argmin()
    found = []
    for members, weights in zip(evicted, seen.weights, strict=True):
        number = members.sum(dim=0)[:, None]
        looked_at = members * seen.attention[:, None]
        paid = looked_at.sum(dim=0)[:, None]
        mean_k, mean_v = members.T @ k / number.clamp(min=1), members.T @ v / number.clamp(min=1)
        value = (mean_v + looked_at.T @ v / paid.clamp(min=_TINY)) / 2
        missed = weights - q @ mean_k.T
        # Of numbers that are not finite nothing can be solved; whoever stores rows refuses them.
        solved, _ = torch.linalg.solve_ex(damped, q.T @ missed)
        key = mean_k + solved.T
        fits = (key.abs() <= torch.finfo(dtype).max).all(dim=1, keepdim=True)
        key = torch.where(fits, key, mean_k)
        is_there = number > 0
        found.append(
            torch.stack(
                [torch.where(is_there, key, k[least]), torch.where(is_there, value, v[least])]
            )
        )
    return torch.stack(found)


class _Seen(NamedTuple):
    """How queries see keys.

    weights, of each band [samples, CLUSTERS]: the log-sum-exp over the evicted keys of a cluster;
    attention [tokens]: what all queries pay to a key.
    """

    weights: list[Tensor]
    attention: Tensor


def _seen(q: Tensor, k: Tensor, evicted: Sequence[Tensor]) -> _Seen:
    """Queries [samples, d] over keys [tokens, d]; evicted, of each band [tokens, CLUSTERS]."""
    weights: list[list[Tensor]] = [[] for _ in evicted]
    attention = torch.zeros(len(k), device=q.device)
    for some in q.split(max(1, _LOGITS_AT_ONCE // len(k))):
        logits = some @ k.T
        highest = logits.amax(dim=1, keepdim=True)
        shares = logits.sub_(highest).exp_()
        attention += shares.sum(dim=1).reciprocal() @ shares
        for parts, members in zip(weights, evicted, strict=True):
            parts.append((shares @ members).clamp(min=_TINY).log() + highest)
    return _Seen([torch.cat(parts) for parts in weights], attention)


def _clustered(k: Tensor) -> Tensor:
    """The cluster of each key [tokens], by k-means from keys that lie evenly spread."""
    sample = _evenly(k, min(len(k), _CLUSTERED_KEYS))
    centres = _evenly(sample, CLUSTERS)
    for _ in range(_ROUNDS):
        members = torch.nn.functional.one_hot(_nearest(sample, centres), CLUSTERS).to(k.dtype)
        number = members.sum(dim=0)[:, None]
        # A cluster without members stays where it is.
        centres = torch.where(number > 0, members.T @ sample / number.clamp(min=1), centres)
    return _nearest(k, centres)


def _nearest(k: Tensor, centres: Tensor) -> Tensor:
    return (k @ centres.T - centres.square().sum(dim=1) / 2).argmax(dim=1)


def _evenly(rows: Tensor, count: int) -> Tensor:
    return rows[torch.linspace(0, len(rows) - 1, count, device=rows.device).long()]
