"""What attention does in a forward that answers: questions in slices, and tokens one by one."""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.attention import ragged_decode_batch, ragged_prefill
from kvkeep_kernels.layout import DecodeBatch, DecodeGroup, RaggedKV
from kvkeep_kernels.padded_tails import Readers, decode_padded
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.tail_batch import TailBatch


class Reader(Protocol):
    """Who reads: what is read, and the tail that grows."""

    context: ContextView
    tail: Tail


def by_context(readers: Several[Reader]) -> list[int]:
    """Their indices, those on one context one after the other; in turn of who came first."""
    turns: dict[int, int] = {}
    turn = [turns.setdefault(id(one.context), len(turns)) for one in readers]
    return sorted(range(len(turn)), key=turn.__getitem__)


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of one question, ``start`` to ``stop`` among the tokens of a forward."""

    sequence: Reader
    start: int
    stop: int
    is_last: bool


class QuestionPass:
    """New tokens of one question: the whole context visible, its own tail causally."""

    def __init__(self, context: ContextView, tail: Tail) -> None:
        self._context = context
        self._tail = tail

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, batch 1. Modifies the tail."""
        if self._context.arrival is not None:
            self._context.arrival.wait(layer)
        if self._context.lead and self._tail.tokens == 0:
            self._tail.write_lead(layer, self._context.lead[layer])
        own, bounds = self._tail.write(layer, k[0], v[0]), self._tail.bounds(layer)
        rows = self._context.layers[layer]
        return ragged_prefill(q[0], rows, own, scale=scale, bounds=bounds)[None]


class QuestionsPass:
    """Slices of several questions in one row, each attending as if it were alone."""

    def __init__(self, slices: Several[Slice]) -> None:
        self._parts = [
            (slice(one.start, one.stop), QuestionPass(one.sequence.context, one.sequence.tail))
            for one in slices
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, batch 1. Modifies the tails."""
        outs = [
            part.attend(layer, q[:, :, rows], k[:, :, rows], v[:, :, rows], scale)
            for rows, part in self._parts
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


class DecodePass:
    """One new token of every sequence; those on one context read its rows together."""

    def __init__(self, sequences: Several[Reader]) -> None:
        """Those on one context follow one another: see ``by_context``."""
        self._sequences = sequences
        groups = groupby(sequences, lambda one: id(one.context))
        self._groups = [list(members) for _, members in groups]

    def extend(self) -> None:
        """Count the rows that every layer has now written. Modifies the tails."""
        for sequence in self._sequences:
            sequence.tail.extend(1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, one token each. Modifies the tails."""
        groups = []
        rows_of = zip(k.unbind(), v.unbind(), strict=True)
        for members in self._groups:
            tails = (one.tail.write(layer, *next(rows_of)) for one in members)
            groups.append(DecodeGroup(members[0].context.layers[layer], tuple(tails)))
        batch, bounds = DecodeBatch(tuple(groups)), self._groups[0][0].tail.bounds(layer)
        return ragged_decode_batch(q[:, :, 0], batch, scale=scale, bounds=bounds)[:, :, None]


class PaddedDecodePass:
    """As ``DecodePass``, over plain rows of a CPU, in the order of a batch of tails."""

    def __init__(self, sequences: Several[Reader], together: TailBatch) -> None:
        self._together = together
        members: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            members.setdefault(id(sequence.context), []).append(index)
        self._groups = [
            (sequences[places[0]].context, torch.tensor(places)) for places in members.values()
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, one token each. Modifies the batch of tails."""
        tails = self._together.write(layer, k[:, :, 0], v[:, :, 0])
        groups = []
        for context, members in self._groups:
            rows = context.layers[layer]
            assert isinstance(rows, RaggedKV), "asked before the batch was made"
            groups.append(Readers(rows, members))
        return decode_padded(q[:, :, 0], groups, tails, scale=scale)[:, :, None]

    def extend(self) -> None:
        """As ``DecodePass.extend``."""
        self._together.extend()
