"""KVzip's score: the most attention any repeat row pays to each context row.

Two passes, so that the [rows, columns] matrix never exists as a whole: first each row's
log-sum-exp over prefix, chunk and causal repeat columns, then each chunk column's maximum of
``s - lse``. Sums and scores are fp32: bf16 scores tie in great numbers, and tied rows are kept
in index order instead of by importance.

Source: arXiv 2505.23416, section 3; the exponential is taken once per column, since
max exp(x) = exp(max x).
"""

import torch
from torch import Tensor

from kvkeep_kernels.layout import ShapeError

TILE_ROWS = 512
"""Query rows of one head and group member per tile: bounds scratch to 512 x columns floats."""


def row_lse(
    q: Tensor, k_prefix: Tensor, k_chunk: Tensor, k_repeat: Tensor, *, scale: float
) -> Tensor:
    """Pass 1: each repeat row's log-sum-exp over prefix, chunk and causal repeat columns.

    Shapes: q [num_q_heads, rows, head_dim], the newest rows of the repeat input; k_prefix,
        k_chunk [num_kv_heads, tokens, head_dim]; k_repeat [num_kv_heads, repeat_tokens,
        head_dim], whose last ``rows`` tokens are the rows of q.
    Dtypes: any of bf16 | fp16 | fp32. Returns [num_q_heads, rows] fp32. Modifies: nothing.
    Raises: ShapeError.
    """
    num_kv_heads, rows = k_chunk.shape[0], q.shape[1]
    _check(q, k_chunk, k_repeat)
    earlier = k_repeat.shape[1] - rows
    grouped = q.unflatten(0, (num_kv_heads, -1))
    out = torch.empty(grouped.shape[:3], device=q.device)
    whole = torch.cat([k_prefix, k_chunk, k_repeat[:, :earlier]], dim=1).float()
    own = k_repeat[:, earlier:].float()
    for first in range(0, rows, TILE_ROWS):
        last = min(first + TILE_ROWS, rows)
        tile = grouped[:, :, first:last].float() * scale
        seen = torch.logsumexp(_logits(tile, whole), dim=-1)
        causal = _logits(tile, own[:, :last])
        row = torch.arange(first, last, device=q.device)[:, None]
        future = torch.arange(last, device=q.device)[None, :] > row
        recent = torch.logsumexp(causal.masked_fill_(future, -torch.inf), dim=-1)
        out[:, :, first:last] = torch.logaddexp(seen, recent)
    return out.flatten(0, 1)


def chunk_max_attention(q: Tensor, k_chunk: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """Pass 2: the highest softmax weight of each chunk column over rows and query group.

    Shapes: q [num_q_heads, rows, head_dim]; k_chunk [num_kv_heads, chunk, head_dim]; lse
        [num_q_heads, rows] fp32, from ``row_lse`` or from a forward that attended to exactly
        these keys. Returns [num_kv_heads, chunk] fp32, in [0, 1] to rounding.
    Modifies: nothing. The running maximum over several slices of rows is
        ``torch.maximum`` of the results.
    Raises: ShapeError.
    """
    num_kv_heads = k_chunk.shape[0]
    _check(q, k_chunk, q)
    if lse.shape != q.shape[:2]:
        raise ShapeError("lse", tuple(lse.shape), tuple(q.shape[:2]))
    grouped = q.unflatten(0, (num_kv_heads, -1))
    row_norm = lse.float().unflatten(0, (num_kv_heads, -1))
    keys = k_chunk.float()
    best = torch.full(k_chunk.shape[:2], -torch.inf, device=q.device)
    for first in range(0, q.shape[1], TILE_ROWS):
        tile = slice(first, first + TILE_ROWS)
        logits = _logits(grouped[:, :, tile].float() * scale, keys)
        logits -= row_norm[:, :, tile, None]
        torch.maximum(best, logits.amax(dim=(1, 2)), out=best)
    return best.exp_()


def _logits(rows: Tensor, keys: Tensor) -> Tensor:
    """[heads, group, rows, d] x [heads, keys, d] -> [heads, group, rows, keys]."""
    heads, group, tokens, head_dim = rows.shape
    flat = torch.bmm(rows.reshape(heads, group * tokens, head_dim), keys.transpose(1, 2))
    return flat.reshape(heads, group, tokens, keys.shape[1])


def _check(q: Tensor, k_chunk: Tensor, k_repeat: Tensor) -> None:
    if q.shape[0] % k_chunk.shape[0] or q.shape[2] != k_chunk.shape[2]:
        raise ShapeError(
            "q", tuple(q.shape), f"heads and head_dim of k_chunk {tuple(k_chunk.shape)}"
        )
    if k_repeat.shape[1] < q.shape[1]:
        raise ShapeError("k_repeat tokens", k_repeat.shape[1], f"at least {q.shape[1]}")
