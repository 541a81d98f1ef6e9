"""Decode steps and questions with soft caps and windows, checked against the oracle."""

from dataclasses import dataclass
from functools import cached_property

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvkeep_kernels import reference
from kvkeep_kernels.attention import ragged_decode_batch, ragged_prefill
from kvkeep_kernels.layout import CodeKind, DecodeBatch, DecodeGroup, LogitBounds

from ...support.ragged_values import KINDS, dense, placed, quantized, ragged

SCALE = 0.3
_HEAD_DIM = 64


@dataclass(frozen=True)
class BoundedCase:
    """One context for each of ``lengths`` (rows of its heads), each with all of ``tails``."""

    lengths: tuple[tuple[int, ...], ...]
    tails: tuple[int, ...]
    bounds: LogitBounds
    group_size: int
    kind: CodeKind | None = None
    text_tokens: int = 60

    @cached_property
    def batch(self) -> DecodeBatch:
        torch.manual_seed(sum(self.tails))
        groups = []
        for seed, lengths in enumerate(self.lengths):
            rows = placed(ragged(lengths, _HEAD_DIM, seed), self.text_tokens + seed)
            tails = tuple(dense(len(lengths), tokens, _HEAD_DIM) for tokens in self.tails)
            groups.append(DecodeGroup(quantized(rows, self.kind), tails))
        return DecodeBatch(tuple(groups))

    @cached_property
    def queries(self) -> tuple[Tensor, Tensor]:
        """Of one decode step, and of a question at the end of the first context's last tail."""
        heads = len(self.lengths[0]) * self.group_size
        torch.manual_seed(1)
        step = torch.randn(self.batch.num_sequences, heads, _HEAD_DIM)
        return step, torch.randn(heads, min(9, -(-self.tails[-1] // 2)), _HEAD_DIM)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Decode's and prefill's."""
        step, question = self.queries
        context, tails = self.batch.groups[0].context, self.batch.groups[0].tails
        return (
            ragged_decode_batch(step, self.batch, scale=SCALE, bounds=self.bounds),
            ragged_prefill(question, context, tails[-1], scale=SCALE, bounds=self.bounds),
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """The oracle's."""
        step, question = self.queries
        context, tails = self.batch.groups[0].context, self.batch.groups[0].tails
        options = {"scale": SCALE, "bounds": self.bounds}
        steps = [
            reference.ragged_decode(rows, group.context, group.tails, **options)
            for rows, group in zip(step.split(len(self.tails)), self.batch.groups, strict=True)
        ]
        own = reference.ragged_prefill(question, context, tails[-1], **options)
        return torch.cat(steps), own

    def check(self) -> None:
        for out, expected in zip(self.outputs(), self.expected(), strict=True):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@st.composite
def cases(draw: st.DrawFn) -> BoundedCase:
    heads = draw(st.integers(1, 2))
    lengths = st.lists(st.sampled_from([0, 1, 33, 70]), min_size=heads, max_size=heads).map(tuple)
    caps, windows = st.sampled_from([None, 0.5, 20.0]), st.sampled_from([None, 1, 2, 30, 1000])
    return BoundedCase(
        tuple(draw(st.lists(lengths, min_size=1, max_size=2))),
        tuple(draw(st.lists(st.sampled_from([1, 2, 5, 40]), min_size=1, max_size=3))),
        LogitBounds(draw(caps), draw(windows)),
        group_size=draw(st.integers(1, 4)),
        kind=draw(st.sampled_from([None, *KINDS])),
    )
