"""Attention whose logits are bounded, by a soft cap or a sliding window, in plain torch.

The stock kernels that ``attention`` calls know no cap and no window of ragged rows, so whole
logits are made here, head by head, in fp32; a context's are made once for all its members.
"""

import torch
from torch import Tensor

from kvkeep_kernels.layout import (
    ContextRows,
    DecodeGroup,
    DenseKV,
    LogitBounds,
    QuantizedKV,
    runs_on_host,
)
from kvkeep_kernels.quantize import code_values


def decode(q: Tensor, group: DecodeGroup, scale: float, bounds: LogitBounds) -> Tensor:
    """As ``attention.ragged_decode`` over one group; q [members, num_q_heads, head_dim]."""
    by_head = q.float().unflatten(1, (group.context.num_kv_heads, -1))
    out = torch.empty_like(by_head)
    for head in range(group.context.num_kv_heads):
        k, v, positions = _head(group.context, head)
        shared = torch.matmul(by_head[:, head], k.T)
        for member, tail in enumerate(group.tails):
            rows = by_head[member, head]
            products = torch.cat([shared[member], rows @ tail.k[head].float().T], dim=-1)
            last = torch.full((1, 1), tail.tokens - 1, device=q.device)
            seen = _visible(last, positions, tail.tokens, bounds.window)
            weights = _weights(products, seen, scale, bounds.soft_cap)
            over_tail = weights[:, len(k) :] @ tail.v[head].float()
            out[member, head] = weights[:, : len(k)] @ v + over_tail
    return out.flatten(1, 2).to(q.dtype)


def prefill(
    q: Tensor, context: ContextRows, tail: DenseKV, scale: float, bounds: LogitBounds
) -> Tensor:
    """As ``attention.ragged_prefill``; q [num_q_heads, tokens, head_dim]."""
    by_head = q.float().unflatten(0, (context.num_kv_heads, -1))
    out = torch.empty_like(by_head)
    token = torch.arange(tail.tokens - q.shape[1], tail.tokens, device=q.device)[:, None]
    for head in range(context.num_kv_heads):
        k, v, positions = _head(context, head)
        keys, values = torch.cat([k, tail.k[head].float()]), torch.cat([v, tail.v[head].float()])
        seen = _visible(token, positions, tail.tokens, bounds.window)
        products = torch.matmul(by_head[head], keys.T)
        out[head] = _weights(products, seen, scale, bounds.soft_cap) @ values
    return out.flatten(0, 1).to(q.dtype)


def _weights(products: Tensor, seen: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """Softmax of [..., rows, keys]; every row sees its own key, so no sum is empty."""
    logits = products * scale
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1)


def _visible(token: Tensor, positions: Tensor, tail_tokens: int, window: int | None) -> Tensor:
    """Which context rows, then which tail rows, tail tokens [rows, 1] see: [rows, keys] bool.

    ``positions`` of the context's rows are counted from the tail's first.
    """
    own = torch.arange(tail_tokens, device=token.device)
    position = torch.cat([positions, own])
    seen = position <= token
    return seen if window is None else seen & (position > token - window)


def _head(context: ContextRows, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """K and V of one head in fp32, and where its rows stand, counted from a tail's first."""
    first, length = runs_on_host(context)[head]
    run = slice(first, first + length)
    positions = torch.full((run.stop - run.start,), -1, device=context.k.device)
    if context.placement is not None:
        positions = context.placement.positions[run].long() - context.placement.end
    k, v = context.k[run], context.v[run]
    if not isinstance(context, QuantizedKV):
        return k.float(), v.float(), positions
    scale = context.k_scale[run, None].float()
    keys = code_values(k, context.kind) * scale.abs()
    values = code_values(v, context.kind) * context.v_scale[run, None].float()
    if context.k_zero is not None and context.v_zero is not None:
        keys += context.k_zero[run, None].float()
        values += context.v_zero[run, None].float()
    if context.k_mean is not None:
        keys += (scale > 0) * context.k_mean[head].float()
    return keys, values, positions
