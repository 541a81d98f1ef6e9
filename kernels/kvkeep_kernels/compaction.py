"""Selection of the rows to keep, by one total order, and their gather into ragged runs.

The order: each head's best unprotected row first, by score; then
all others by score descending, layer, head, position. A ratio keeps a prefix of that order, so
every lower ratio is a prefix of every higher one, floors included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.layout import DenseKV, RaggedKV, ShapeError


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows stay, ordered and banded.

    positions[layer] [rows] int64: head after head; inside a head the protected positions
        ascending, then importance descending.
    counts [bands, layers, heads] int32: rows each band adds; band 0 includes the protected.
    ratios: the fraction kept at the end of each band, ascending; the last is the built ratio.
    num_protected: protected positions per head.
    num_selected: unprotected rows kept over all layers and heads; num_eligible: of how many.
    """

    positions: tuple[Tensor, ...]
    counts: Tensor
    ratios: tuple[float, ...]
    num_protected: int
    num_selected: int
    num_eligible: int

    @property
    def ratio_achieved(self) -> float:
        """Kept over eligible rows, protected ones apart; 1.0 when nothing was eligible."""
        return self.num_selected / self.num_eligible if self.num_eligible else 1.0


def kept_count(ratio: float, num_heads_total: int, num_eligible_tokens: int) -> int:
    """Rows that ``ratio`` (fraction kept) keeps: rounded half up, at least one per head."""
    eligible = num_heads_total * num_eligible_tokens
    return min(eligible, max(num_heads_total, int(ratio * eligible + 0.5)))


LEAST_SHARE = 10
"""Of an equal share of what is kept, a head gets one row in so many at least: ``shared_out``."""


def shared_out(scores: Tensor, protected: Tensor) -> Tensor:
    """Scores in the same order, but for each head's best rows, which come earlier.

    However many rows are kept, each head then keeps one for every ``LEAST_SHARE`` that an equal
    share would give it. A row's place is the earlier of its rank among all rows and its rank in its
    head times ``LEAST_SHARE`` times the number of heads, so lower ratios stay prefixes of higher.
    Shapes: as for ``select``. Returns [layers, heads, tokens] fp32; 0 where protected.
    Modifies: nothing. Ties: as in ``select``. Raises: ShapeError, when a score is not finite.
    Source: the safeguard of Ada-KV (arXiv 2407.11550), made an order of all rows.
    """
    num_layers, num_heads, _ = scores.shape
    _check_finite(scores, protected)
    free = torch.nonzero(~protected).flatten().to(scores.device)
    eligible = scores.float()[:, :, free] + 0.0
    heads = num_layers * num_heads
    overall = _ranks(eligible.reshape(1, -1)).view(eligible.shape)
    own = _ranks(eligible.reshape(heads, -1)).view(eligible.shape)
    placed = torch.zeros_like(scores, dtype=torch.float32)
    placed[:, :, free] = -torch.minimum(overall, own * (LEAST_SHARE * heads)).float()
    return placed


def _ranks(rows: Tensor) -> Tensor:
    """Each one's place in its row [n, m], highest first, by the order of ``select``."""
    order = torch.sort(rows, dim=1, descending=True, stable=True).indices
    places = torch.arange(rows.shape[1], device=rows.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def select(scores: Tensor, protected: Tensor, ratios: Sequence[float]) -> Selection:
    """Choose rows over all layers and heads at once.

    Shapes: scores [layers, heads, tokens] fp32, finite where not protected; protected [tokens]
        bool. ratios ascending in (0, 1]; the last decides what is kept, the others cut bands.
    Modifies: nothing. Ties are broken by (layer, head, position), never by memory order. Runs on
        the scores' device, by the same exact steps on each; the host waits for the check that
        scores are finite, for the count of each band and head, which size the result, and for
        ``protected`` if that is on a GPU too. Positions stay on the device, counts do not.
    Raises: ShapeError, when shapes disagree, ratios do not ascend, or a score is not finite.
    """
    num_layers, num_heads, num_tokens = scores.shape
    _check_selection(scores, protected, ratios)
    free = torch.nonzero(~protected).flatten().to(scores.device)
    # Adding zero turns -0.0 into 0.0: a radix sort may tell them apart, the order must not.
    eligible = scores.float()[:, :, free].flatten() + 0.0
    total_heads, num_free = num_layers * num_heads, len(free)
    if num_free == 0:
        return keep_all(num_layers, num_heads, num_tokens, len(protected))
    order = torch.sort(eligible, descending=True, stable=True).indices
    order = _floors_first(order, num_free, total_heads)
    limits = [kept_count(ratio, total_heads, num_free) for ratio in ratios]
    fixed = torch.nonzero(protected).flatten().to(scores.device)
    return _banded(order[: limits[-1]], limits, tuple(ratios), scores.shape, free, fixed)


def keep_all(num_layers: int, num_heads: int, num_tokens: int, num_protected: int) -> Selection:
    """The selection that evicts nothing: every row, in position order, one band of ratio 1."""
    every = torch.arange(num_tokens).repeat(num_heads)
    eligible = num_layers * num_heads * (num_tokens - num_protected)
    counts = torch.full((1, num_layers, num_heads), num_tokens, dtype=torch.int32)
    return Selection((every,) * num_layers, counts, (1.0,), num_protected, eligible, eligible)


def compact(cache: DenseKV, positions: Tensor, length: Tensor) -> RaggedKV:
    """Gather one layer's kept rows into head-major, importance-ordered runs.

    Shapes: cache.k [num_kv_heads, tokens, head_dim]; positions [rows] as in ``Selection``;
        length [num_kv_heads], rows of each head. Returns new buffers that alias nothing.
    The host waits for ``length`` only where that is on a GPU, and for the check of the result.
    A position outside the cache is an error on a CPU and a row of NaN on a GPU.
    Raises: ShapeError, when the lengths do not add up to the positions.
    """
    num_kv_heads, _, _ = cache.k.shape
    if length.shape != (num_kv_heads,) or int(length.sum()) != len(positions):
        raise ShapeError("length", length.tolist(), f"{num_kv_heads} adding to {len(positions)}")
    device = cache.k.device
    where, rows = positions.to(device), length.to(device=device, dtype=torch.int32)
    if uses_triton(device):
        from kvkeep_kernels._triton import compaction

        k, v = compaction.gather(cache, where, rows)
    else:
        heads = torch.arange(num_kv_heads, device=device)
        head = torch.repeat_interleave(heads, rows, output_size=len(where))
        k, v = cache.k[head, where], cache.v[head, where]
    start = torch.cumsum(rows, dim=0, dtype=torch.int32) - rows
    return RaggedKV(k, v, start, rows)


def _check_selection(scores: Tensor, protected: Tensor, ratios: Sequence[float]) -> None:
    if protected.shape != scores.shape[2:] or protected.dtype != torch.bool:
        raise ShapeError("protected", tuple(protected.shape), tuple(scores.shape[2:]))
    ascending = all(low < high for low, high in pairwise(ratios))
    if not ratios or not ascending or not 0 < ratios[0] <= ratios[-1] <= 1:
        raise ShapeError("ratios", tuple(ratios), "ascending within (0, 1]")
    _check_finite(scores, protected)


def _check_finite(scores: Tensor, protected: Tensor) -> None:
    if not bool(torch.isfinite(scores[:, :, ~protected]).all()):
        raise ShapeError("scores", "a value that is not finite", "finite unprotected scores")


def _floors_first(order: Tensor, num_free: int, total_heads: int) -> Tensor:
    """The same flat indices with each head's first one in front, both parts in their order."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    # Not argmax, which promises no rule for ties: a head's best is its first in the stable order.
    floor_rank = torch.sort(rank.reshape(total_heads, num_free).amin(dim=1)).values
    is_floor = torch.zeros(len(order), dtype=torch.bool, device=order.device)
    is_floor[floor_rank] = True
    # Scattered and not selected by the mask, since a mask's size would have to reach the host.
    floors_upto = torch.cumsum(is_floor, dim=0)
    rank = torch.arange(total_heads, total_heads + len(order), device=order.device) - floors_upto
    rank[floor_rank] = torch.arange(total_heads, device=order.device)
    out = torch.empty_like(order)
    out[rank] = order
    return out


def _banded(
    kept: Tensor,
    limits: Sequence[int],
    ratios: tuple[float, ...],
    shape: torch.Size,
    free: Tensor,
    fixed: Tensor,
) -> Selection:
    """Turn ranked flat indices into per-layer positions and per-band counts."""
    num_layers, num_heads, _ = shape
    total_heads, num_free = num_layers * num_heads, len(free)
    head_of = kept // num_free
    rank = torch.arange(len(kept), device=kept.device)
    band_of = torch.searchsorted(torch.tensor(limits, device=kept.device), rank, right=True)
    cells = torch.zeros(len(limits) * total_heads, dtype=torch.int64, device=kept.device)
    # Not bincount, which asks the device for the largest index.
    cells.index_add_(0, band_of * total_heads + head_of, torch.ones_like(head_of))
    counts = cells.cpu().reshape(len(limits), num_layers, num_heads)
    by_head = torch.sort(head_of, stable=True).indices
    ranked = torch.split(free[kept[by_head] % num_free], counts.sum(dim=0).flatten().tolist())
    positions = []
    for layer in range(num_layers):
        runs = ranked[layer * num_heads : (layer + 1) * num_heads]
        positions.append(torch.cat([rows for run in runs for rows in (fixed, run)]))
    counts[0] += len(fixed)
    return Selection(
        tuple(positions),
        counts.to(dtype=torch.int32),
        ratios,
        len(fixed),
        len(kept),
        total_heads * num_free,
    )
