"""Attention over ragged context rows and dense tails, merged by log-sum-exp.

Every function splits the keys into parts, attends to each part alone, and merges the partial
outputs exactly. Where torch serves, ``cpu_attention`` attends to plain rows. Quantised rows are
multiplied as codes, block by block; scales and zeros meet the products, never the rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep_kernels import bounded, cpu_attention
from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.cpu_attention import Attended, flash
from kvkeep_kernels.layout import (
    UNBOUNDED,
    CodeKind,
    ContextRows,
    DecodeBatch,
    DecodeGroup,
    DenseKV,
    LogitBounds,
    QuantizedKV,
    RaggedKV,
    ShapeError,
    check_bounds,
    check_tail,
    runs_on_host,
)
from kvkeep_kernels.quantize import code_values

_CODE_ROWS = 2048
"""Quantised rows that are floats at a time: a block of K, or of V, stays in a core's cache."""


def ragged_decode(
    q: Tensor,
    context: ContextRows,
    tails: Sequence[DenseKV],
    *,
    scale: float,
    bounds: LogitBounds = UNBOUNDED,
) -> Tensor:
    """Attend one new token of every member over the shared context and its own tail.

    Shapes: q [members, num_q_heads, head_dim]; context as its type says; tails[i].k
        [num_kv_heads, tail_tokens_i, head_dim], each with the new token's own row last.
    Dtypes: q, tails and ``context.dtype`` alike (bf16 | fp16 | fp32); sums in fp32. Returns q's
        shape and dtype.
    Modifies: nothing. The context's rows are read once for all members.
    Raises: ShapeError, naming the tensor, its shape and the expected one.
    """
    batch = DecodeBatch((DecodeGroup(context, tuple(tails)),))
    return ragged_decode_batch(q, batch, scale=scale, bounds=bounds)


def ragged_decode_batch(
    q: Tensor, batch: DecodeBatch, *, scale: float, bounds: LogitBounds = UNBOUNDED
) -> Tensor:
    """Attend one new token of every sequence of a batch, in one launch where a GPU serves it.

    Shapes: q [num_sequences, num_q_heads, head_dim], the sequences in the batch's order.
    Dtypes, Raises: as ``ragged_decode``. Modifies: nothing. Each group's context is read once
        for as many of its members as fit one tile (64 query rows of a head on a GPU, 32 in
        fp32; no limit on a CPU). On a GPU: asynchronous, lengths never wait for the host.
    """
    context = batch.groups[0].context
    num_sequences, num_q_heads, _ = q.shape
    _check_queries(q, num_q_heads, context)
    if num_sequences != batch.num_sequences:
        raise ShapeError("q sequences", num_sequences, f"{batch.num_sequences}, one per tail")
    for group in batch.groups:
        check_bounds(group.context, bounds)
    if uses_triton(q.device):
        return _launch_decode(q, batch, scale, bounds)
    if len(batch.groups) == 1 and bounds == UNBOUNDED:
        return _decode_group(q, batch.groups[0], scale)
    sizes = [len(group.tails) for group in batch.groups]
    pieces = zip(torch.split(q, sizes), batch.groups, strict=True)
    if bounds != UNBOUNDED:
        return torch.cat(
            [bounded.decode(rows, group, scale, bounds) for rows, group in pieces],
        )
    return torch.cat([_decode_group(rows, group, scale) for rows, group in pieces])


def ragged_prefill(
    q: Tensor,
    context: ContextRows,
    tail: DenseKV,
    *,
    scale: float,
    bounds: LogitBounds = UNBOUNDED,
) -> Tensor:
    """Attend a question's new tokens: the whole context is visible, the tail causally.

    Shapes: q [num_q_heads, tokens, head_dim]; tail.k [num_kv_heads, tail_tokens, head_dim]
        with the new tokens' own rows last, tail_tokens >= tokens.
    Dtypes, Modifies, Raises: as ``ragged_decode``. Returns q's shape and dtype.
    """
    num_q_heads, tokens, head_dim = q.shape
    _check_queries(q, num_q_heads, context)
    check_tail(context, tail)
    if tail.tokens < tokens:
        raise ShapeError("tail tokens", tail.tokens, f"at least the {tokens} new tokens")
    check_bounds(context, bounds)
    if uses_triton(q.device):
        from kvkeep_kernels._triton import prefill

        return prefill.launch(q, context, tail, scale=scale, bounds=bounds)
    if bounds != UNBOUNDED:
        return bounded.prefill(q, context, tail, scale, bounds)
    folded = q.reshape(context.num_kv_heads, -1, head_dim)
    over_context = _unfold(_context_part(folded, context, scale), num_q_heads, tokens)
    return _merge([over_context, *_causal_parts(q, tail, scale)]).out


def dense_prefill(q: Tensor, own: DenseKV, *, scale: float, window: int | None = None) -> Attended:
    """Attend new tokens causally over an uncompressed cache that has their own rows last.

    Shapes: q [num_q_heads, tokens, head_dim]; own.k [num_kv_heads, own_tokens, head_dim],
        own_tokens >= tokens. With ``window`` a token sees so many, itself included.
    Dtypes, Modifies, Raises: as ``ragged_decode``. Returns the output with its log-sum-exp over
        everything attended, which KVzip scoring re-uses.
    """
    num_q_heads, _, head_dim = q.shape
    _check_heads(num_q_heads, head_dim, own.k.shape[0], own.k.shape[2])
    if window is not None:
        return _in_window(q, own, scale, window)
    return _merge(_causal_parts(q, own, scale))


def attend_also(
    q: Tensor, attended: Attended, visible: Sequence[DenseKV], *, scale: float
) -> Attended:
    """What tokens attended to already, joined with whole pieces of an uncompressed cache.

    Shapes: q [num_q_heads, tokens, head_dim]; ``attended`` of the same rows; visible pieces as in
        ``dense_prefill``, of any length.
    Dtypes, Modifies, Raises: as ``ragged_decode``. Returns as ``dense_prefill``.
    """
    num_q_heads, tokens, head_dim = q.shape
    parts = [attended]
    for piece in visible:
        if piece.tokens:
            _check_heads(num_q_heads, head_dim, piece.k.shape[0], piece.k.shape[2])
            folded = q.reshape(piece.k.shape[0], -1, head_dim)
            parts.append(_unfold(_flash(folded, piece.k, piece.v, scale), num_q_heads, tokens))
    return _merge(parts)


def _in_window(q: Tensor, own: DenseKV, scale: float, window: int) -> Attended:
    """New tokens over the last ones of a cache that ends with their own rows."""
    num_q_heads, tokens, head_dim = q.shape
    num_kv_heads = own.k.shape[0]
    seen = min(own.tokens, tokens + window - 1)
    k, v = own.k[:, None, -seen:], own.v[:, None, -seen:]
    shape = (num_kv_heads, num_q_heads // num_kv_heads, seen, head_dim)
    row = torch.arange(seen - tokens, seen, device=q.device)[:, None]
    column = torch.arange(seen, device=q.device)
    mask = torch.zeros(tokens, seen, dtype=q.dtype, device=q.device)
    mask.masked_fill_((column > row) | (column <= row - window), -torch.inf)
    grouped = q.unflatten(0, (num_kv_heads, -1))
    found = flash(grouped, k.expand(shape), v.expand(shape), scale, mask[None, None])
    return Attended(found.out.flatten(0, 1), found.lse.flatten(0, 1))


def _check_heads(num_q_heads: int, head_dim: int, num_kv_heads: int, kv_head_dim: int) -> None:
    if num_q_heads % num_kv_heads or head_dim != kv_head_dim:
        raise ShapeError(
            "q", (num_q_heads, head_dim), f"a multiple of {num_kv_heads} heads of {kv_head_dim}"
        )


def _check_queries(q: Tensor, num_q_heads: int, context: ContextRows) -> None:
    _check_heads(num_q_heads, q.shape[2], context.num_kv_heads, context.head_dim)
    # A kernel reads by address: whatever else it were handed, it would take for these.
    if (q.dtype, q.device) != (context.dtype, context.k.device):
        raise ShapeError("q", (q.dtype, q.device), (context.dtype, context.k.device))


def _launch_decode(q: Tensor, batch: DecodeBatch, scale: float, bounds: LogitBounds) -> Tensor:
    """The GPU path: one launch for every form that contexts of the batch are in."""
    from kvkeep_kernels._triton import decode, work_list

    group_size = q.shape[1] // batch.groups[0].context.num_kv_heads
    forms: dict[CodeKind | None, list[int]] = {}
    for index, group in enumerate(batch.groups):
        context = group.context
        kind = context.kind if isinstance(context, QuantizedKV) else None
        forms.setdefault(kind, []).append(index)
    if len(forms) == 1:
        return decode.launch(q, work_list.tabulate(batch, group_size), scale=scale, bounds=bounds)
    pieces = list(torch.split(q, [len(group.tails) for group in batch.groups]))
    for members in forms.values():
        alike = DecodeBatch(tuple(batch.groups[index] for index in members))
        rows = torch.cat([pieces[index] for index in members])
        tables = work_list.tabulate(alike, group_size)
        out = decode.launch(rows, tables, scale=scale, bounds=bounds)
        sizes = [len(batch.groups[index].tails) for index in members]
        for index, piece in zip(members, torch.split(out, sizes), strict=True):
            pieces[index] = piece
    return torch.cat(pieces)


def _decode_group(q: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """The CPU path of one group: the context for all members at once, then tail by tail."""
    context = group.context
    if isinstance(context, RaggedKV):
        return cpu_attention.decode(q, group, scale)
    members, num_q_heads, head_dim = q.shape
    group_size = num_q_heads // context.num_kv_heads
    # [heads, members * group, d]: one tile of query rows per KV head.
    by_head = (
        q.unflatten(1, (context.num_kv_heads, group_size))
        .transpose(0, 1)
        .reshape(context.num_kv_heads, members * group_size, head_dim)
    )
    shared = _context_part(by_head, context, scale)
    parts = []
    for member, tail in enumerate(group.tails):
        rows = slice(member * group_size, (member + 1) * group_size)
        own = _flash(by_head[:, rows], tail.k, tail.v, scale)
        parts.append(_merge([Attended(shared.out[:, rows], shared.lse[:, rows]), own]).out)
    return torch.stack([part.reshape(num_q_heads, head_dim) for part in parts])


def _context_part(by_head: Tensor, context: ContextRows, scale: float) -> Attended:
    """Attend [heads, rows, d] query rows to each head's own run; empty heads get lse = -inf."""
    if isinstance(context, RaggedKV):
        return cpu_attention.over_runs(by_head, context, scale)
    heads, rows, _ = by_head.shape
    out = torch.zeros_like(by_head)
    lse = torch.full((heads, rows), -torch.inf, device=by_head.device)
    for head, (start, length) in enumerate(runs_on_host(context)):
        if length:
            run = slice(start, start + length)
            mean = None if context.k_mean is None else context.k_mean[head].float()
            part = _over_codes(by_head[head, None].float(), context, run, mean, scale)
            out[head], lse[head] = part.out[0], part.lse[0]
    return Attended(out, lse)


def _over_codes(
    q: Tensor, context: QuantizedKV, run: slice, mean: Tensor | None, scale: float
) -> Attended:
    """Attend [1, rows, d] fp32 to one head's run and its channel means [d]; fp32."""
    q_sum = q.sum(dim=-1, keepdim=True)
    q_mean = None if mean is None else torch.matmul(q, mean)[..., None]
    parts = []
    for first in range(run.start, run.stop, _CODE_ROWS):
        block = slice(first, min(first + _CODE_ROWS, run.stop))
        k_scale = context.k_scale[block].float()
        k_codes = code_values(context.k[block], context.kind)
        logits = torch.matmul(q, k_codes.T).mul_(k_scale.abs())
        if context.k_zero is not None:
            logits.add_(q_sum * context.k_zero[block].float())
        if q_mean is not None:
            logits.add_(q_mean * (k_scale > 0))
        logits.mul_(scale)
        lse = torch.logsumexp(logits, dim=-1)
        weights = logits.sub_(lse[..., None]).exp_()
        zeros = None
        if context.v_zero is not None:
            zeros = torch.matmul(weights, context.v_zero[block].float())
        v_codes = code_values(context.v[block], context.kind)
        out = torch.matmul(weights.mul_(context.v_scale[block].float()), v_codes)
        if zeros is not None:
            out.add_(zeros[..., None])
        parts.append(Attended(out, lse))
    return _merge(parts)


def _causal_parts(q: Tensor, tail: DenseKV, scale: float) -> list[Attended]:
    """The tail before the new tokens, wholly visible, and the new tokens among themselves."""
    num_q_heads, tokens, head_dim = q.shape
    num_kv_heads = tail.k.shape[0]
    earlier = tail.tokens - tokens
    if earlier < 0:
        raise ShapeError("tail tokens", tail.tokens, f"at least the {tokens} new tokens")
    parts = []
    if earlier:
        folded = q.reshape(num_kv_heads, -1, head_dim)
        before = _flash(folded, tail.k[:, :earlier], tail.v[:, :earlier], scale)
        parts.append(_unfold(before, num_q_heads, tokens))
    # A causal mask is square, so the group cannot be folded into rows here: expand instead.
    grouped = q.unflatten(0, (num_kv_heads, -1))
    shape = (num_kv_heads, grouped.shape[1], tokens, head_dim)
    k = tail.k[:, None, earlier:].expand(shape)
    v = tail.v[:, None, earlier:].expand(shape)
    own = flash(grouped, k, v, scale, is_causal=True)
    parts.append(Attended(own.out.flatten(0, 1), own.lse.flatten(0, 1)))
    return parts


def _flash(rows: Tensor, k: Tensor, v: Tensor, scale: float) -> Attended:
    """Unmasked attention of [heads, rows, d] over [heads, keys, d]."""
    found = flash(rows[None], k[None], v[None], scale)
    return Attended(found.out[0], found.lse[0])


def _unfold(part: Attended, num_q_heads: int, tokens: int) -> Attended:
    """[heads, group * tokens, ...] back to [num_q_heads, tokens, ...]."""
    return Attended(
        part.out.reshape(num_q_heads, tokens, -1), part.lse.reshape(num_q_heads, tokens)
    )


def _merge(parts: Sequence[Attended]) -> Attended:
    """Join partial softmaxes exactly; a part with lse = -inf has no weight.

    Of each part and those before it, one must have a finite lse for every row: the first part
    may be an empty context, since every tail holds the token's own row.
    """
    dtype = parts[0].out.dtype
    out, lse = parts[0].out.float(), parts[0].lse
    for part in parts[1:]:
        # e^b / (e^a + e^b) = sigmoid(b - a): one pass a part, and no stacked copies.
        weight = torch.sigmoid(part.lse - lse)[..., None]
        out = torch.lerp(out, part.out.float(), weight)
        lse = torch.logaddexp(lse, part.lse)
    return Attended(out.to(dtype), lse)
