"""Inputs of the column reduction, and the answers that a wrong one would give."""

import math
from dataclasses import dataclass

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
        return scoring.column_reduce(self.q, self.k, self.lse, *bounds, op, scale=self.scale)

    def expected(self, op: scoring.Reduction, **changed: object) -> Tensor:
        """The oracle's answer, to other inputs where some are named."""
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
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> ColumnCase:
    """Random inputs; column t is token t, and query rows are the last ``rows`` of its tokens.

    ``window`` w: token t is seen from token t + w on. ``documents``: packed into the same rows,
    each seen by its own queries alone. Keys and queries are views into larger buffers.
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
    return ColumnCase(q, k, lse, first, last, scale)
