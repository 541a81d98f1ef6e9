"""Attention over plain rows where torch serves: few calls a layer, every thread at work.

A part of the keys is one call of torch's flash attention, the only stock kernel of a CPU that
also returns its log-sum-exp; it works in one thread for each head it is given. So a head's run is
handed over as several: equally long segments of it, as views. Query rows of a group are folded
into rows of one head, because one query row per call is several times slower.

Source: FlashDecoding split-K; the merge is FlashInfer's "recursive attention".
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep_kernels import stock_flash
from kvkeep_kernels.layout import DecodeGroup, RaggedKV, runs_on_host

_SEGMENT_ROWS = 512
"""Shorter segments than these gain less than it costs a second thread to wake."""


class Attended(NamedTuple):
    """An attention output and its log-sum-exp.

    Shapes: out [num_q_heads, tokens, head_dim] in q's dtype; lse [num_q_heads, tokens] fp32.
    """

    out: Tensor
    lse: Tensor


class HeadSegments(NamedTuple):
    """One head's run as segments of equal length, as views.

    Shapes: k, v [1, segments, rows, head_dim]; mask [1, segments, 1, rows] in k's dtype, -inf for
    rows that the next segment has too; None where no two segments share one.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None


def decode(q: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """The context for all members at once, then tail by tail; q [members, num_q_heads, d]."""
    context = group.context
    assert isinstance(context, RaggedKV)
    heads, members = context.num_kv_heads, len(group.tails)
    grouped = q.reshape(members, heads, -1, q.shape[2])
    by_head = grouped[0] if members == 1 else grouped.transpose(0, 1).flatten(1, 2)
    own = [
        flash(rows[None], tail.k[None], tail.v[None], scale)
        for rows, tail in zip(grouped.unbind(), group.tails, strict=True)
    ]
    tails = own[0]
    if members > 1:
        out = torch.cat([part.out for part in own], dim=2)
        tails = Attended(out, torch.cat([part.lse for part in own], dim=2))
    merged = _joined(*_over_segments(by_head, context, scale, tails))
    if members == 1:
        return merged.reshape(q.shape)
    by_member = merged.reshape(heads, members, -1, q.shape[2])
    return by_member.transpose(0, 1).reshape(q.shape)


def over_runs(by_head: Tensor, context: RaggedKV, scale: float) -> Attended:
    """Attend [heads, rows, d] query rows to each head's own run; empty heads get lse = -inf."""
    parts = _over_segments(by_head, context, scale)
    if parts.out.shape[1] == 1:
        return Attended(parts.out[:, 0], parts.lse[:, 0])
    lse = torch.logsumexp(parts.lse, dim=1)
    # Of a head without rows every part has lse -inf, of which no softmax can be made.
    lses = torch.where(lse[:, None].isneginf(), 0.0, parts.lse)
    return Attended(_joined(parts.out, lses), lse)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Attended:
    """Attention of [batch, heads, rows, d] over [batch, heads, keys, d], keys >= 1."""
    if q.device.type == "cpu":
        found = torch._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return Attended(*found)
    if mask is None and stock_flash.failure(q.device) is None:
        return Attended(*stock_flash.attend(q, k, v, scale, is_causal=is_causal))
    logits = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if mask is not None:
        logits += mask
    if is_causal:
        logits.masked_fill_(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    return Attended(torch.matmul(torch.exp(logits - lse[..., None]), v.float()).to(q.dtype), lse)


def _over_segments(
    by_head: Tensor, context: RaggedKV, scale: float, tails: Attended | None = None
) -> Attended:
    """As ``over_runs``, not merged yet: out [heads, parts, rows, d], lse [heads, parts, rows].

    ``tails``: what the same rows [1, heads, rows, d] found in tails, which becomes one part more.
    """
    heads, rows, head_dim = by_head.shape
    found = segments(context)
    count = max(1 if run is None else run.k.shape[1] for run in found)
    queries = by_head[:, None].expand(heads, count, rows, head_dim).chunk(heads)
    own_outs = tails.out.chunk(heads, dim=1) if tails else ()
    own_lses = tails.lse.chunk(heads, dim=1) if tails else ()
    outs, lses = [], []
    for head, run in enumerate(found):
        present = 0 if run is None else run.k.shape[1]
        if run is not None:
            part = flash(queries[head][:, :present], run.k, run.v, scale, run.mask)
            outs.append(part.out)
            lses.append(part.lse)
        if present < count:
            shape = (1, count - present, rows)
            outs.append(by_head.new_zeros(*shape, head_dim))
            lses.append(torch.full(shape, -torch.inf, device=by_head.device))
        outs += own_outs[head : head + 1]
        lses += own_lses[head : head + 1]
    # One list for all heads: of the calls in a layer, those on small tensors cost the most.
    out, lse = torch.cat(outs, dim=1), torch.cat(lses, dim=1)
    return Attended(out.view(heads, -1, rows, head_dim), lse.view(heads, -1, rows))


def segments(context: RaggedKV) -> Sequence[HeadSegments | None]:
    """Every head's run in as many segments as there are threads for it; None for an empty one.

    Worked out once for a context and number of threads: the views stay true whatever the rows
    become. A mask takes one number for each row.
    """
    threads = torch.get_num_threads() if context.k.device.type == "cpu" else 1
    found = context.prepared.get(threads)
    if found is None:
        runs = runs_on_host(context)
        longest = max(length for _, length in runs)
        count = max(1, min(threads, longest // _SEGMENT_ROWS))
        found = [_cut(context, start, length, count) if length else None for start, length in runs]
        context.prepared[threads] = found
    return found


def _cut(context: RaggedKV, start: int, length: int, count: int) -> HeadSegments:
    """Segment i begins at row i * (length // count), and all are as long as the last one."""
    count = min(count, length)
    step = length // count
    left = length - count * step
    rows, head_dim = step + left, context.head_dim

    def view(kv: Tensor) -> Tensor:
        row = kv.stride(0)
        first = kv.storage_offset() + start * row
        return kv.as_strided((1, count, rows, head_dim), (0, step * row, row, kv.stride(1)), first)

    mask = None
    if left and count > 1:
        mask = torch.zeros(1, count, 1, rows, dtype=context.dtype, device=context.k.device)
        mask[:, :-1, :, step:] = -torch.inf
    return HeadSegments(view(context.k), view(context.v), mask)


def _joined(outs: Tensor, lses: Tensor) -> Tensor:
    """Join partial softmaxes exactly: [heads, parts, rows, d], one finite lse for every row."""
    weights = torch.softmax(lses, dim=1)
    return (outs * weights[..., None]).sum(dim=1).to(outs.dtype)
