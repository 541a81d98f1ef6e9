"""Inputs of the column reduction, and the answers that a wrong one would give."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep_kernels import reference, scoring


@dataclass(frozen=True, slots=True)
class ColumnCase:
    """Queries, keys and windows as ``scoring.column_reduce`` takes them; None is no bound."""

    q: Tensor
    k: Tensor
    lse: Tensor
    first_query: Tensor | None
    last_query: Tensor | None
    scale: float
    log_factor: Tensor | None = None

    @property
    def first(self) -> Tensor:
        if self.first_query is None:
            return torch.zeros(self.k.shape[1], dtype=torch.int64)
        return self.first_query

    @property
    def last(self) -> Tensor:
        if self.last_query is None:
            return torch.full(self.k.shape[1:2], self.q.shape[1])
        return self.last_query

    def reduced(self, op: scoring.Reduction) -> Tensor:
        bounds = (self.first_query, self.last_query)
        return scoring.column_reduce(
            self.q, self.k, self.lse, *bounds, op, scale=self.scale, log_factor=self.log_factor
        )

    def expected(self, op: scoring.Reduction, **changed: object) -> Tensor:
        """The oracle's answer, to other inputs where some are named."""
        if self.log_factor is not None:
            # Every query head has keys of its own, so that its factor comes before the maximum.
            group_size = self.q.shape[0] // self.k.shape[0]
            keys = self.k.repeat_interleave(group_size, 0)
            alone = replace(self, k=keys, log_factor=None).expected(op, **changed)
            return (alone + self.log_factor).unflatten(0, (-1, group_size)).amax(1)
        inputs = {
            "q": self.q,
            "k": self.k,
            "lse": self.lse,
            "first_query": self.first,
            "last_query": self.last,
            "scale": self.scale,
            **changed,
        }
        return reference.column_reduce(op=op, **inputs).float()

    def mutants(self, op: scoring.Reduction) -> dict[str, Tensor]:
        """What comes out with one thing wrong, by the name of the thing."""
        count = (self.last.clamp(max=self.q.shape[1]) - self.first.clamp(min=0)).clamp(min=1)
        other: scoring.Reduction = "logsum" if op == "max" else "max"
        right = self.expected(op)
        group_size = self.q.shape[0] // self.k.shape[0]
        each = self.expected(op, k=self.k.repeat_interleave(group_size, 0))
        return {
            "no lse": self.expected(op, lse=torch.zeros_like(self.lse)),
            "d > t + w": self.expected(op, first_query=self.first + 1),
            "d >= t + w - 1": self.expected(op, first_query=self.first - 1),
            "last query seen": self.expected(op, last_query=self.last + 1),
            "mean for max": self.expected("logsum") - torch.log(count.float()),
            "mean over the group": each.exp().unflatten(0, (-1, group_size)).mean(1).log(),
            "other reduction": self.expected(other),
            "no scale": self.expected(op, scale=1.0),
            "base 2": right * math.log(2),
            "not a logarithm": right.exp(),
            "heads swapped": self.expected(op, k=self.k.flip(0)),
        }


def column_case(
    heads: int,
    group_size: int,
    rows: int,
    columns: int,
    *,
    window: int | None = None,
    documents: int = 0,
    has_factors: bool = False,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> ColumnCase:
    """Random inputs; column t is token t, and query rows are the last ``rows`` of its tokens.

    ``window`` w: token t is seen from token t + w on. ``documents``: packed into the same rows,
    each seen by its own queries alone. ``has_factors``: columns of every query head weigh
    differently. Keys and queries are views into larger buffers.
    """
    scale = head_dim**-0.5
    q = torch.randn(rows, heads * group_size, head_dim, dtype=dtype).transpose(0, 1)
    k = torch.randn(heads, columns + 3, head_dim, dtype=dtype)[:, 1:-2]
    logits = torch.einsum("hgqd,hkd->hgqk", q.unflatten(0, (heads, -1)).float(), k.float()) * scale
    lse = torch.logsumexp(logits, dim=-1).flatten(0, 1)
    token = torch.arange(columns)
    first = None if window is None else token + window - (columns - rows)
    last = None
    if documents:
        size = -(-columns // documents)
        last = (token // size + 1) * size - (columns - rows)
    factor = torch.randn(columns, heads * group_size).T if has_factors else None
    return ColumnCase(q, k, lse, first, last, scale, factor)


def plus_factors(q: Tensor, v: Tensor, hidden_size: int) -> tuple[Tensor, scoring.PlusFactors]:
    """A random output projection [num_q_heads, hidden, d] and hidden states, as KVzip+ sees them.

    v [num_kv_heads, columns, d]. Returns the factor of every (query head, row, column) in fp64
    too, by another road: whole vectors, not norms.
    """
    projection = torch.randn(q.shape[0], hidden_size, v.shape[2])
    states = torch.randn(q.shape[1], hidden_size) * 3
    values = v.repeat_interleave(q.shape[0] // v.shape[0], 0)
    moved = torch.einsum("hed,hcd->hce", projection.double(), values.double())
    norms = moved.square().sum(-1).sqrt()
    naive = norms[:, None, :] / states.double().square().sum(-1).sqrt()[None, :, None]
    return naive, scoring.PlusFactors(norms.float(), torch.linalg.vector_norm(states, dim=-1))


def naive_plus_score(
    q: Tensor, keys: tuple[Tensor, Tensor, Tensor], naive: Tensor, scale: float
) -> Tensor:
    """KVzip+ of prefix, chunk and repeat keys, the whole matrix in fp64."""
    prefix, chunk, _ = keys
    group_size = q.shape[0] // chunk.shape[0]
    every = torch.cat(keys, dim=1).double().repeat_interleave(group_size, 0)
    logits = q.double() @ every.transpose(1, 2) * scale
    rows, first, last = q.shape[1], prefix.shape[1], prefix.shape[1] + chunk.shape[1]
    logits[..., last:].masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -math.inf)
    weights = torch.softmax(logits, dim=-1)[..., first:last] * naive
    return weights.amax(1).unflatten(0, (-1, group_size)).amax(1)
