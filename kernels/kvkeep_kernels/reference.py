"""The fp32 oracle of every operation: obviously right, never fast; for tests and the self-test.

Nothing here shares code with the paths it checks.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvkeep_kernels.layout import UNBOUNDED, ContextRows, DenseKV, LogitBounds, QuantizedKV


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, soft_cap: float | None = None
) -> Tensor:
    """Softmax attention of one query row over some rows of one head.

    Shapes: q [head_dim]; k, v [rows, head_dim], rows >= 1. Returns [head_dim] fp32.
    """
    logits = (k.float() @ q.float()) * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return torch.softmax(logits, dim=0) @ v.float()


def head_rows(context: ContextRows, head: int) -> tuple[Tensor, Tensor]:
    """K and V of one head as fp32 numbers, each [length, head_dim]."""
    first = int(context.start[head])
    run = slice(first, first + int(context.length[head]))
    k, v = context.k[run].float(), context.v[run].float()
    if isinstance(context, QuantizedKV):
        if context.kind == "int4":
            k, v = (torch.stack([x % 16, x // 16], dim=-1).flatten(1) for x in (k, v))
        elif context.kind == "fp8":
            k, v = (x[run].view(torch.float8_e4m3fn).float() for x in (context.k, context.v))
        scale = context.k_scale[run, None].float()
        k, v = k * scale.abs(), v * context.v_scale[run, None].float()
        if context.k_zero is not None and context.v_zero is not None:
            k, v = k + context.k_zero[run, None].float(), v + context.v_zero[run, None].float()
        if context.k_mean is not None:
            k = k + torch.where(scale > 0, context.k_mean[head].float(), 0.0)
    return k, v


def ragged_decode(
    q: Tensor,
    context: ContextRows,
    tails: Sequence[DenseKV],
    *,
    scale: float,
    bounds: LogitBounds = UNBOUNDED,
) -> Tensor:
    """Oracle of ``attention.ragged_decode``; same shapes, returns fp32."""
    out = torch.empty_like(q, dtype=torch.float32)
    group_size = q.shape[1] // context.num_kv_heads
    for member, tail in enumerate(tails):
        for q_head in range(q.shape[1]):
            head = q_head // group_size
            k, v = head_rows(context, head)
            keys, values = (
                torch.cat([k, tail.k[head].float()]),
                torch.cat([v, tail.v[head].float()]),
            )
            near = _in_window(context, head, tail, bounds.window)
            out[member, q_head] = attend_rows(
                q[member, q_head],
                keys[near],
                values[near],
                scale=scale,
                soft_cap=bounds.soft_cap,
            )
    return out


def _in_window(context: ContextRows, head: int, tail: DenseKV, window: int | None) -> list[int]:
    """Which rows of a head, then of a tail, the tail's last token sees, by original positions."""
    length = int(context.length[head])
    if window is None or context.placement is None:
        return list(range(length + tail.tokens))
    first, end = int(context.start[head]), context.placement.end
    positions = context.placement.positions[first : first + length].tolist()
    positions += range(end, end + tail.tokens)
    return [row for row, position in enumerate(positions) if positions[-1] - position < window]


def ragged_prefill(
    q: Tensor,
    context: ContextRows,
    tail: DenseKV,
    *,
    scale: float,
    bounds: LogitBounds = UNBOUNDED,
) -> Tensor:
    """Oracle of ``attention.ragged_prefill``; same shapes, returns fp32."""
    num_tokens = q.shape[1]
    hidden = tail.tokens - num_tokens
    rows = []
    for token in range(num_tokens):
        seen = hidden + token + 1
        visible = DenseKV(tail.k[:, :seen], tail.v[:, :seen])
        new = q[None, :, token]
        rows.append(ragged_decode(new, context, [visible], scale=scale, bounds=bounds)[0])
    return torch.stack(rows, dim=1)


def row_lse(
    q: Tensor, k_prefix: Tensor, k_chunk: Tensor, k_repeat: Tensor, *, scale: float
) -> Tensor:
    """Oracle of ``scoring.row_lse``, one row at a time; same shapes, returns fp32."""
    num_q_heads, rows, _ = q.shape
    group_size = num_q_heads // k_chunk.shape[0]
    lse = torch.empty(num_q_heads, rows)
    for q_head in range(num_q_heads):
        head = q_head // group_size
        for row in range(rows):
            own = k_repeat[head, : k_repeat.shape[1] - rows + row + 1]
            keys = torch.cat([k_prefix[head], k_chunk[head], own]).float()
            lse[q_head, row] = torch.logsumexp(keys @ q[q_head, row].float() * scale, dim=0)
    return lse


def chunk_max_attention(
    q: Tensor, k_prefix: Tensor, k_chunk: Tensor, k_repeat: Tensor, *, scale: float
) -> Tensor:
    """Oracle of ``scoring.chunk_max_attention`` with the whole matrix in memory.

    Shapes as there, with q covering every repeat row. Returns [num_kv_heads, chunk] fp32.
    """
    num_kv_heads, chunk = k_chunk.shape[0], k_chunk.shape[1]
    num_rows = q.shape[1]
    group_size = q.shape[0] // num_kv_heads
    keys = torch.cat([k_prefix, k_chunk, k_repeat], dim=1).float()
    grouped = q.float().unflatten(0, (num_kv_heads, group_size))
    logits = torch.einsum("hgqd,hkd->hgqk", grouped, keys) * scale
    first_repeat = k_prefix.shape[1] + chunk
    future = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
    logits[..., first_repeat:].masked_fill_(future, -math.inf)
    weights = torch.softmax(logits, dim=-1)
    columns = weights[..., k_prefix.shape[1] : first_repeat]
    return columns.amax(dim=(1, 2))


def column_reduce(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    first_query: Tensor,
    last_query: Tensor,
    op: Literal["max", "logsum"],
    *,
    scale: float,
) -> Tensor:
    """Oracle of ``scoring.column_reduce``, one column of one query head at a time, in fp64.

    Shapes as there, both bounds given. Returns [num_kv_heads, columns] fp64.
    """
    num_q_heads, rows, _ = q.shape
    num_kv_heads, columns, _ = k.shape
    received = torch.full((num_q_heads, columns), -math.inf, dtype=torch.float64)
    for q_head in range(num_q_heads):
        head = q_head // (num_q_heads // num_kv_heads)
        for column in range(columns):
            seen = range(rows)[max(0, int(first_query[column])) : max(0, int(last_query[column]))]
            if seen:
                logits = q[q_head, seen].double() @ k[head, column].double() * scale
                weights = torch.exp(logits - lse[q_head, seen].double())
                value = weights.max() if op == "max" else weights.sum()
                received[q_head, column] = torch.log(value)
    grouped: Tensor = received.unflatten(0, (num_kv_heads, -1))
    return grouped.amax(dim=1)


def total_order(scores: Tensor, protected: Tensor) -> list[tuple[int, int, int]]:
    """Oracle of the selection order: every unprotected (layer, head, position), best first.

    Shapes: scores [layers, heads, tokens]; protected [tokens] bool.
    """
    num_layers, num_heads, num_tokens = scores.shape
    free = [token for token in range(num_tokens) if not protected[token]]
    entries = [
        (-float(scores[layer, head, token]), layer, head, token)
        for layer in range(num_layers)
        for head in range(num_heads)
        for token in free
    ]
    entries.sort()
    seen: set[tuple[int, int]] = set()
    floors: list[tuple[int, int, int]] = []
    others: list[tuple[int, int, int]] = []
    for _, layer, head, token in entries:
        target = others if (layer, head) in seen else floors
        seen.add((layer, head))
        target.append((layer, head, token))
    return floors + others
