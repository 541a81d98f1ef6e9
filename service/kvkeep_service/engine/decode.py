"""Sequences and their forwards: a question's tokens in slices, then one token for all at once."""

import time
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep_kernels.attention import ragged_decode_batch, ragged_prefill
from kvkeep_kernels.layout import DecodeBatch, DecodeGroup, RaggedKV
from kvkeep_kernels.padded_tails import Readers, decode_padded
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.detokenize import TextStream
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.sampling import PickedToken, Sampler, SamplingOptions, picked
from kvkeep_service.engine.tail_batch import TailBatch, is_worthwhile
from kvkeep_service.ports import FinishReason

QUESTION_SLICE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """What a query asks of the engine. ``stop`` holds non-empty strings.

    ``top_logprobs``: how many likeliest tokens to note beside each one picked; None notes none.
    """

    max_tokens: int
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None


class Sequence:
    """One running query: its question, its tail, its text so far.

    Positions continue at the document's length N, however few of its rows were kept.
    ``read_at`` and ``first_token_at``: when reading began and the first token was there, by
    ``time.perf_counter``. ``num_reused``: tokens of the question that were in its tail already.
    ``tail_bytes_max``: what its tail may grow to.
    """

    def __init__(
        self,
        model: LanguageModel,
        context: ContextView,
        question_ids: Several[int],
        options: SequenceOptions,
        *,
        tokenizer: Any,
        stop_ids: frozenset[int],
        tail: Tail | None = None,
    ) -> None:
        """``question_ids`` holds at least one token.

        ``tail`` is a tail that nobody else uses, in which a beginning of these tokens, and not
        all of them, stands already: those are not read again.
        """
        self.context = context
        self.question_ids = tuple(question_ids)
        self.generated: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.tail = tail or Tail(model.shape, dtype=model.dtype, device=model.device)
        self.num_reused = self.tail.tokens
        assert self.num_reused < len(self.question_ids), "nothing is left to be read"
        self._options = options
        # A tail doubles when it is full.
        shape, most_tokens = model.shape, 2 * (len(self.question_ids) + options.max_tokens)
        row_bytes = (
            2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
        )
        self.tail_bytes_max = row_bytes * most_tokens
        self._sampler = Sampler(options.sampling)
        self._stop_ids = stop_ids
        self._text = TextStream(tokenizer, options.stop)
        self.logprobs: list[PickedToken] = []
        self.read_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def position(self) -> int:
        """Position of the next token to be read."""
        return self.context.num_tokens + self.tail.tokens

    @property
    def next_slice(self) -> tuple[int, ...]:
        """The tokens of the question that are to be read next; the same in any batch."""
        first = self.tail.tokens
        return self.question_ids[first : first + QUESTION_SLICE_TOKENS]

    @property
    def has_to_wait(self) -> bool:
        """Whether reading may have to wait for layers of the context."""
        arrival = self.context.arrival
        return arrival is not None and not arrival.is_settled

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole question has been read."""
        return self.tail.tokens >= len(self.question_ids)

    def accept(self, logits: Tensor) -> str:
        """Pick the next token from [vocabulary] logits; return the text that became certain.

        A stop token ends the answer and is counted among the generated tokens, but has no text.
        Raises: FloatingPointError for logits that are not finite: no token follows from them.
        """
        if not bool(torch.isfinite(logits).all()):
            raise FloatingPointError("the model gave logits that are not finite")
        token = self._sampler.pick(logits)
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.generated.append(token)
        if self._options.top_logprobs is not None:
            self.logprobs.append(picked(logits, token, self._options.top_logprobs))
        if token in self._stop_ids:
            self.finish_reason = "stop"
            return self._text.finish()
        piece = self._text.push(token)
        if self._text.is_stopped:
            self.finish_reason = "stop"
        elif len(self.generated) >= self._options.max_tokens:
            self.finish_reason = "length"
            piece += self._text.finish()
        return piece


def prefill_question(model: LanguageModel, sequence: Sequence) -> str | None:
    """As ``prefill_questions``, of one; but for layers that are still to arrive, it waits.

    Raises: NotYet, what ended the load of the context, and what picking its token raised.
    """
    (outcome,) = prefill_questions(model, [sequence])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def prefill_questions(
    model: LanguageModel, sequences: Several[Sequence]
) -> list[str | Exception | None]:
    """Read the next slice of every question, in one forward. One bounded work item.

    Returns for each the first text once all of it is read, else None; or what picking its token
    raised, which spares the others.
    Modifies the sequences and their tails, which stay as they were when the forward fails.
    """
    now = time.perf_counter()
    slices: list[_Slice] = []
    positions: list[int] = []
    token_ids: list[int] = []
    for sequence in sequences:
        if sequence.read_at is None:
            sequence.read_at = now
        piece = sequence.next_slice
        sequence.tail.reserve(len(piece))
        is_last = sequence.tail.tokens + len(piece) == len(sequence.question_ids)
        start = len(token_ids)
        slices.append(_Slice(sequence, start, start + len(piece), is_last))
        positions += range(sequence.position, sequence.position + len(piece))
        token_ids += piece
    hidden = model.hidden(
        torch.tensor([token_ids]), torch.tensor([positions]), _QuestionsPass(slices)
    )
    ends = [one.stop - 1 for one in slices if one.is_last]
    logits = iter(model.logits(hidden[0, ends]) if ends else ())
    for one in slices:
        one.sequence.tail.extend(one.stop - one.start)
    return [_accepted(one.sequence, next(logits)) if one.is_last else None for one in slices]


def decode_step(
    model: LanguageModel, sequences: Several[Sequence], together: TailBatch | None = None
) -> list[str | Exception]:
    """One token for every running sequence, in one forward.

    ``together`` is kept by the caller from step to step: with it, many tails cost less.
    Returns each one's new text, or what picking its token raised, which spares the others.
    Modifies every sequence and its tail, or, when the forward fails, none.
    """
    for sequence in sequences:
        sequence.tail.reserve(1)
    ordered = sequences
    attention: _DecodePass | _PaddedDecodePass
    has_windows = bool(model.shape.windows)
    if together is not None and not has_windows and _is_padding_worthwhile(sequences):
        ordered = [sequences[n] for n in together.arrange([one.tail for one in sequences])]
        attention = _PaddedDecodePass(ordered, together)
    else:
        attention = _DecodePass(sequences)
        if together is not None:
            together.clear()
    token_ids = torch.tensor([[sequence.generated[-1]] for sequence in ordered])
    positions = torch.tensor([[sequence.position] for sequence in ordered])
    hidden = model.hidden(token_ids, positions, attention)
    logits = model.logits(hidden[:, -1])
    attention.extend()
    pairs = zip(ordered, logits, strict=True)
    outcomes = {id(sequence): _accepted(sequence, row) for sequence, row in pairs}
    return [outcomes[id(sequence)] for sequence in sequences]


def _is_padding_worthwhile(sequences: Several[Sequence]) -> bool:
    layers = (sequence.context.layers[0] for sequence in sequences)
    is_plain = all(isinstance(rows, RaggedKV) for rows in layers)
    return is_plain and is_worthwhile([sequence.tail for sequence in sequences])


def _accepted(sequence: Sequence, logits: Tensor) -> str | Exception:
    try:
        return sequence.accept(logits)
    # Whatever it was, it is one sequence's and not the batch's.
    except Exception as error:  # noqa: BLE001
        return error


@dataclass(frozen=True, slots=True)
class _Slice:
    """A piece of one question, ``start`` to ``stop`` among the tokens of a forward."""

    sequence: Sequence
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
        own, bounds = self._tail.write(layer, k[0], v[0]), self._tail.bounds(layer)
        rows = self._context.layers[layer]
        return ragged_prefill(q[0], rows, own, scale=scale, bounds=bounds)[None]


class _QuestionsPass:
    """Slices of several questions in one row, each attending as if it were alone."""

    def __init__(self, slices: Several[_Slice]) -> None:
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


class _DecodePass:
    """One new token of every sequence; those on one context read its rows together."""

    def __init__(self, sequences: Several[Sequence]) -> None:
        self._sequences = sequences
        groups: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            groups.setdefault(id(sequence.context), []).append(index)
        self._groups = list(groups.values())
        order = [index for members in self._groups for index in members]
        # Copying rows into the order they are in costs as much as a part of the attention.
        self._order = None if order == sorted(order) else torch.tensor(order)

    def extend(self) -> None:
        """Count the rows that every layer has now written. Modifies the tails."""
        for sequence in self._sequences:
            sequence.tail.extend(1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, one token each. Modifies the tails."""
        groups = []
        for members in self._groups:
            rows = self._sequences[members[0]].context.layers[layer]
            tails = (self._sequences[m].tail.write(layer, k[m], v[m]) for m in members)
            groups.append(DecodeGroup(rows, tuple(tails)))
        batch = DecodeBatch(tuple(groups))
        bounds = self._sequences[0].tail.bounds(layer)
        if self._order is None:
            out = ragged_decode_batch(q[:, :, 0], batch, scale=scale, bounds=bounds)
            return out[:, :, None]
        out = torch.empty_like(q)
        ordered = q[self._order, :, 0]
        out[self._order, :, 0] = ragged_decode_batch(ordered, batch, scale=scale, bounds=bounds)
        return out


class _PaddedDecodePass:
    """As ``_DecodePass``, over plain rows of a CPU, in the order of a batch of tails."""

    def __init__(self, sequences: Several[Sequence], together: TailBatch) -> None:
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
        """As ``_DecodePass.extend``."""
        self._together.extend()
