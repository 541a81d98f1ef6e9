"""KVzip's score: the most attention any repeat row pays to each context row.

Two passes, so that the [rows, columns] matrix never exists as a whole: first each row's
log-sum-exp over prefix, chunk and causal repeat columns, then each chunk column's maximum of
``s - lse``, which is one case of ``column_reduce``. Sums and scores are fp32: bf16 scores tie in
great numbers, and tied rows are kept in index order instead of by importance.

Source: arXiv 2505.23416, section 3; the exponential is taken once per column, since
max exp(x) = exp(max x).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.layout import ShapeError

Reduction = Literal["max", "logsum"]

TILE_ROWS = 512
"""Query rows of one head per tile: bounds scratch to 512 x columns floats."""


class PlusFactors(NamedTuple):
    """What KVzip+ weighs an attention weight by: ``value_norm / hidden_norm``.

    Shapes: value_norm [num_q_heads, columns] fp32, the norm of what a column's value becomes in
    the output projection of a query head; hidden_norm [rows] fp32, above 0, the norm of the
    hidden state that a row's attention reads, or inf for a row that shall not count.
    """

    value_norm: Tensor
    hidden_norm: Tensor


def row_lse(
    q: Tensor, k_prefix: Tensor, k_chunk: Tensor, k_repeat: Tensor, *, scale: float
) -> Tensor:
    """Pass 1: each repeat row's log-sum-exp over prefix, chunk and causal repeat columns.

    Shapes: q [num_q_heads, rows, head_dim], the newest rows of the repeat input; k_prefix,
        k_chunk [num_kv_heads, tokens, head_dim]; k_repeat [num_kv_heads, repeat_tokens,
        head_dim], whose last ``rows`` tokens are the rows of q.
    Dtypes: alike (bf16 | fp16 | fp32). Returns [num_q_heads, rows] fp32. Modifies: nothing.
    Raises: ShapeError.
    """
    rows, earlier = q.shape[1], k_repeat.shape[1] - q.shape[1]
    for k in (k_prefix, k_chunk, k_repeat):
        _check(q, k)
        if len(k) != len(k_chunk):
            raise ShapeError("keys heads", len(k), f"{len(k_chunk)}, those of k_chunk")
    if earlier < 0:
        raise ShapeError("k_repeat tokens", k_repeat.shape[1], f"at least {rows}")
    if uses_triton(q.device):
        from kvkeep_kernels._triton import scoring

        return scoring.row_lse(q, k_prefix, k_chunk, k_repeat, scale=scale)
    whole = torch.cat([k_prefix, k_chunk, k_repeat[:, :earlier]], dim=1)
    return _row_lse_tiled(q, whole.float(), k_repeat[:, earlier:].float(), scale)


def _row_lse_tiled(q: Tensor, whole: Tensor, own: Tensor, scale: float) -> Tensor:
    """Over fp32 keys that every row sees, and the rows' own, which they see causally."""
    rows = q.shape[1]
    grouped = q.unflatten(0, (len(own), -1))
    out = torch.empty(grouped.shape[:3], device=q.device)
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


def chunk_max_attention(
    q: Tensor, k_chunk: Tensor, lse: Tensor, *, scale: float, plus: PlusFactors | None = None
) -> Tensor:
    """Pass 2: the highest softmax weight of each chunk column over rows and query group.

    Shapes: q [num_q_heads, rows, head_dim]; k_chunk [num_kv_heads, chunk, head_dim]; lse
        [num_q_heads, rows] fp32, from ``row_lse`` or from a forward that attended to exactly
        these keys. Returns [num_kv_heads, chunk] fp32, in [0, 1] to rounding; with ``plus``
        every weight is multiplied by its factors before the maximum.
    Modifies: nothing. The running maximum over several slices of rows is
        ``torch.maximum`` of the results.
    Raises: ShapeError.
    """
    log_factor = None
    if plus is not None:
        if plus.hidden_norm.shape != q.shape[1:2]:
            raise ShapeError("hidden_norm", tuple(plus.hidden_norm.shape), tuple(q.shape[1:2]))
        lse, log_factor = lse + plus.hidden_norm.log(), plus.value_norm.log()
    highest = column_reduce(q, k_chunk, lse, None, None, "max", scale=scale, log_factor=log_factor)
    return highest.exp_()


def column_reduce(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    first_query: Tensor | None,
    last_query: Tensor | None,
    op: Reduction,
    *,
    scale: float,
    log_factor: Tensor | None = None,
) -> Tensor:
    """What each key column receives from the query rows of its window, as a logarithm.

    Entry d of column t weighs ``exp(scale * q[d] . k[t] - lse[d] + log_factor[t])``. "max" is
    the log of the highest weight over rows and query group; "logsum" the log of each query
    head's sum over rows, and of those the group's highest.

    Shapes: q [num_q_heads, rows, head_dim]; k [num_kv_heads, columns, head_dim]; lse
        [num_q_heads, rows], each row's log-sum-exp; first_query, last_query [columns] int32 or
        int64: column t sees the rows ``first_query[t] <= d < last_query[t]``, bounds outside
        the rows allowed; None is from the first row on, or to the last; log_factor
        [num_q_heads, columns] fp32, None for 0, -inf for a column that weighs nothing.
    Dtypes: q, k alike (bf16 | fp16 | fp32); sums in fp32. Returns [num_kv_heads, columns] fp32,
        -inf for a column whose window is empty; NaN goes in and comes out.
    Modifies: nothing. Launches asynchronously on a GPU.
    Raises: ShapeError.
    """
    if op not in ("max", "logsum"):
        raise ShapeError("op", op, "max or logsum")
    _check(q, k)
    _check_norm(q, lse)
    _check_bound("first_query", first_query, k)
    _check_bound("last_query", last_query, k)
    _check_factor(log_factor, q, k)
    if uses_triton(q.device):
        from kvkeep_kernels._triton import scoring

        return scoring.column_reduce(
            q, k, lse, first_query, last_query, op, scale=scale, log_factor=log_factor
        )
    return _column_reduce_tiled(q, k, lse, first_query, last_query, op, scale, log_factor)


def _column_reduce_tiled(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    first_query: Tensor | None,
    last_query: Tensor | None,
    op: Reduction,
    scale: float,
    log_factor: Tensor | None,
) -> Tensor:
    num_kv_heads, columns, _ = k.shape
    # A maximum needs no place of its own for every group member, unless each has a factor of its
    # own: a unit is all query rows of a KV head then, and else those of one query head.
    is_joint = op == "max" and log_factor is None
    num_units = num_kv_heads if is_joint else q.shape[0]
    # The row's norm is one more product: subtracting it afterwards would cost as much again.
    rows = torch.cat([q.float() * scale, -lse.float()[..., None]], dim=-1)
    rows = rows.reshape(num_units, -1, rows.shape[2])
    keys = torch.cat([k.float(), k.new_ones((), dtype=torch.float32).expand(*k.shape[:2], 1)], -1)
    received = torch.full((num_units, columns), -torch.inf, device=q.device)
    for unit in range(num_units):
        own = keys[unit * num_kv_heads // num_units].T
        for first in range(0, rows.shape[1], TILE_ROWS):
            logits = torch.mm(rows[unit, first : first + TILE_ROWS], own)
            row = torch.arange(first, first + len(logits), device=q.device)[:, None] % q.shape[1]
            if first_query is not None:
                logits.masked_fill_(row < first_query, -torch.inf)
            if last_query is not None:
                logits.masked_fill_(row >= last_query, -torch.inf)
            if op == "max":
                torch.maximum(received[unit], logits.amax(dim=0), out=received[unit])
            else:
                found = torch.logsumexp(logits, dim=0)
                torch.logaddexp(received[unit], found, out=received[unit])
    if log_factor is not None:
        received += log_factor
    by_head: Tensor = received.unflatten(0, (num_kv_heads, -1))
    return by_head.amax(dim=1)


def _logits(rows: Tensor, keys: Tensor) -> Tensor:
    """[heads, group, rows, d] x [heads, keys, d] -> [heads, group, rows, keys]."""
    heads, group, tokens, head_dim = rows.shape
    flat = torch.bmm(rows.reshape(heads, group * tokens, head_dim), keys.transpose(1, 2))
    return flat.reshape(heads, group, tokens, keys.shape[1])


def _check(q: Tensor, k: Tensor) -> None:
    if q.shape[0] % k.shape[0] or q.shape[2] != k.shape[2]:
        raise ShapeError("q", tuple(q.shape), f"heads and head_dim of keys {tuple(k.shape)}")
    # A kernel reads by address: whatever else it were handed, it would take for these.
    if (q.dtype, q.device) != (k.dtype, k.device):
        raise ShapeError("q", (q.dtype, q.device), (k.dtype, k.device))


def _check_norm(q: Tensor, lse: Tensor) -> None:
    if lse.shape != q.shape[:2]:
        raise ShapeError("lse", tuple(lse.shape), tuple(q.shape[:2]))
    if lse.device != q.device:
        raise ShapeError("lse", lse.device, q.device)


def _check_factor(log_factor: Tensor | None, q: Tensor, k: Tensor) -> None:
    if log_factor is None:
        return
    expected = (torch.Size([q.shape[0], k.shape[1]]), torch.float32, q.device)
    found = (log_factor.shape, log_factor.dtype, log_factor.device)
    if found != expected:
        raise ShapeError("log_factor", found, expected)


def _check_bound(name: str, bound: Tensor | None, k: Tensor) -> None:
    if bound is None:
        return
    if bound.shape != k.shape[1:2] or bound.dtype not in (torch.int32, torch.int64):
        raise ShapeError(name, (tuple(bound.shape), bound.dtype), f"{k.shape[1]} int32 or int64")
    if bound.device != k.device:
        raise ShapeError(name, bound.device, k.device)
