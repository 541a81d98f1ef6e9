"""One decoding step of many sequences on a CPU, whose tails lie side by side in one buffer.

Tail by tail, a layer of 16 short tails costs more in calls than in arithmetic. Here all of them
are one call of flash attention, whatever contexts they belong to; rows beyond a tail are masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep_kernels.cpu_attention import flash, over_runs
from kvkeep_kernels.layout import RaggedKV, ShapeError


@dataclass(frozen=True, slots=True)
class PaddedTails:
    """Tails of a batch, padded to one length with rows that are finite and masked.

    Shapes: k, v [sequences, num_kv_heads, tokens, head_dim], views are welcome; mask [sequences,
    1, 1, tokens] in their dtype: 0, or -inf behind the tail's last row.
    """

    k: Tensor
    v: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        sequences, _, tokens, _ = self.k.shape
        if self.v.shape != self.k.shape:
            raise ShapeError("tails.v", tuple(self.v.shape), tuple(self.k.shape))
        if self.mask.shape != (sequences, 1, 1, tokens):
            raise ShapeError("tails.mask", tuple(self.mask.shape), (sequences, 1, 1, tokens))


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads one context at one step. ``members``: their places in the batch, [n] int64."""

    context: RaggedKV
    members: Tensor


def decode_padded(
    q: Tensor, groups: Sequence[Readers], tails: PaddedTails, *, scale: float
) -> Tensor:
    """Attend one new token of every sequence over its context and its own tail.

    Shapes: q [sequences, num_q_heads, head_dim]; each sequence is in exactly one group, and its
        tail holds the token's own row.
    Dtypes: q, contexts and tails alike; sums in fp32. Returns q's shape and dtype.
    Modifies: nothing. A context's rows are read once for all who read it.
    Raises: ShapeError, naming the tensor, its shape and the expected one.
    Source: FlashInfer "recursive attention": partial softmaxes merged by log-sum-exp.
    """
    sequences, num_q_heads, head_dim = q.shape
    if tails.k.shape[0] != sequences or tails.k.shape[3] != head_dim:
        raise ShapeError("tails.k", tuple(tails.k.shape), (sequences, "heads", "tokens", head_dim))
    heads = tails.k.shape[1]
    grouped = q.reshape(sequences, heads, num_q_heads // heads, head_dim)
    own = flash(grouped, tails.k, tails.v, scale, tails.mask)
    if len(groups) == 1:
        out = _over_context(grouped, groups[0].context, own.out, own.lse, scale)
        return out.reshape(q.shape)
    out = torch.empty_like(grouped)
    for group in groups:
        rows = group.members
        out[rows] = _over_context(grouped[rows], group.context, own.out[rows], own.lse[rows], scale)
    return out.reshape(q.shape)


def _over_context(
    grouped: Tensor, context: RaggedKV, own: Tensor, own_lse: Tensor, scale: float
) -> Tensor:
    """Merge what [members, heads, group, d] queries found in their tails with their context."""
    members, heads, group_size, head_dim = grouped.shape
    by_head = grouped.transpose(0, 1).reshape(heads, members * group_size, head_dim)
    shared = over_runs(by_head, context, scale)
    out = shared.out.reshape(heads, members, group_size, head_dim).transpose(0, 1)
    lse = shared.lse.reshape(heads, members, group_size).transpose(0, 1)
    # e^b / (e^a + e^b) = sigmoid(b - a); a head without rows has a = -inf, and no weight.
    weight = torch.sigmoid(own_lse - lse)[..., None]
    return torch.lerp(out.float(), own.float(), weight).to(grouped.dtype)
