"""Sequences and their forwards: a question's tokens in slices, then one token for all at once."""

import time
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.layout import RaggedKV
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.detokenize import TextStream
from kvkeep_service.engine.graphs import CudaCapture, DeviceSteps, GraphOptions
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.passes import (
    DecodePass,
    PaddedDecodePass,
    QuestionsPass,
    Slice,
    by_context,
)
from kvkeep_service.engine.sampling import PickedToken, Sampler, SamplingOptions, picked
from kvkeep_service.engine.tail_batch import TailBatch, is_worthwhile, place_rows
from kvkeep_service.engine.transfer import Found, found, to_device
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
    ``tail_bytes_max``: what its tail may grow to, with the ``place_rows`` of its place among others
    that are read side by side.
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
        num_lead = context.num_lead
        self.tail = tail or Tail(
            model.shape, dtype=model.dtype, device=model.device, num_lead=num_lead
        )
        assert self.tail.num_lead == num_lead, "it was read over other rows"
        self.num_reused = self.tail.tokens
        assert self.num_reused < len(self.question_ids), "nothing is left to be read"
        self._options = options
        shape = model.shape
        most_rows = num_lead + len(self.question_ids) + options.max_tokens
        has_place = model.device.type == "cpu" and not shape.windows
        self.place_rows = place_rows(most_rows) if has_place else 0
        row_bytes = (
            2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize
        )
        # A tail doubles when it is full.
        self.tail_bytes_max = row_bytes * (2 * most_rows + self.place_rows)
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

    @property
    def needs_logits(self) -> bool:
        """Whether ``accept`` reads all logits, and not only which one is the highest."""
        return self._options.top_logprobs is not None or not self._sampler.is_greedy

    def accept(self, next_token: Found) -> str:
        """Pick the next token; return the text that became certain.

        A stop token ends the answer and is counted among the generated tokens, but has no text.
        Raises: FloatingPointError for logits that are not finite: no token follows from them.
        """
        if not next_token.is_finite:
            raise FloatingPointError("the model gave logits that are not finite")
        token, logits = next_token.best, next_token.logits
        if not self._sampler.is_greedy:
            assert logits is not None, "they were asked for"
            token = self._sampler.pick(logits)
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.generated.append(token)
        if self._options.top_logprobs is not None:
            assert logits is not None, "they were asked for"
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
    slices: list[Slice] = []
    positions: list[int] = []
    token_ids: list[int] = []
    for sequence in sequences:
        if sequence.read_at is None:
            sequence.read_at = now
        piece = sequence.next_slice
        sequence.tail.reserve(len(piece))
        is_last = sequence.tail.tokens + len(piece) == len(sequence.question_ids)
        start = len(token_ids)
        slices.append(Slice(sequence, start, start + len(piece), is_last))
        positions += range(sequence.position, sequence.position + len(piece))
        token_ids += piece
    inputs = to_device(torch.tensor([[token_ids], [positions]]), model.device)
    hidden = model.hidden(inputs[0], inputs[1], QuestionsPass(slices))
    for one in slices:
        one.sequence.tail.extend(one.stop - one.start)
    read = [number for number, one in enumerate(slices) if one.is_last]
    outcomes: dict[int, str | Exception] = {}
    if read:
        last = torch.stack([hidden[0, slices[number].stop - 1] for number in read])
        outcomes = _handed_out(model.logits(last), [sequences[number] for number in read])
    return [outcomes.get(id(sequence)) for sequence in sequences]


def kept_between_steps(model: LanguageModel, graphs: GraphOptions) -> TailBatch | DeviceSteps:
    """What ``decode_step`` wants to find again at the next step of the same model."""
    if not uses_triton(model.device):
        return TailBatch(model.shape, dtype=model.dtype)
    is_captured = graphs.is_on and model.device.type == "cuda"
    return DeviceSteps(model, CudaCapture(model.device) if is_captured else None, graphs.on_held)


def decode_step(
    model: LanguageModel,
    sequences: Several[Sequence],
    together: TailBatch | DeviceSteps | None = None,
) -> list[str | Exception]:
    """One token for every running sequence, in one forward.

    ``together`` is ``kept_between_steps`` by the caller: with it, many tails cost less, or a step's
    launches. The host waits for the device once, for what it found.
    Returns each one's new text, or what picking its token raised, which spares the others.
    Modifies every sequence and its tail, or, when the forward fails, none.
    """
    for sequence in sequences:
        sequence.tail.reserve(1)
    if uses_triton(model.device):
        steps = together if isinstance(together, DeviceSteps) else DeviceSteps(model)
        outcomes = _on_device(steps, sequences)
    else:
        assert not isinstance(together, DeviceSteps), "made for another device"
        outcomes = _on_host(model, sequences, together)
    return [outcomes[id(sequence)] for sequence in sequences]


def _on_device(steps: DeviceSteps, sequences: Several[Sequence]) -> dict[int, str | Exception]:
    rows, logits = steps.step(sequences)
    for sequence in sequences:
        sequence.tail.extend(1)
    return _handed_out(logits, rows)


def _on_host(
    model: LanguageModel, sequences: Several[Sequence], together: TailBatch | None
) -> dict[int, str | Exception]:
    """A step where torch serves, whose calls depend on lengths; also of a GPU without Triton."""
    attention: DecodePass | PaddedDecodePass
    has_windows = bool(model.shape.windows)
    if together is not None and not has_windows and _is_padding_worthwhile(sequences):
        order = together.arrange([one.tail for one in sequences], _rows_max(sequences))
        ordered = [sequences[n] for n in order]
        attention = PaddedDecodePass(ordered, together)
    else:
        ordered = [sequences[n] for n in by_context(sequences)]
        attention = DecodePass(ordered)
        if together is not None:
            together.clear()
    token_ids = [[sequence.generated[-1]] for sequence in ordered]
    positions = [[sequence.position] for sequence in ordered]
    inputs = to_device(torch.tensor([token_ids, positions]), model.device)
    hidden = model.hidden(inputs[0], inputs[1], attention)
    logits = model.logits(hidden[:, -1])
    attention.extend()
    return _handed_out(logits, ordered)


def _is_padding_worthwhile(sequences: Several[Sequence]) -> bool:
    layers = (sequence.context.layers[0] for sequence in sequences)
    is_plain = all(isinstance(rows, RaggedKV) for rows in layers)
    tails = [sequence.tail for sequence in sequences]
    return is_plain and is_worthwhile(tails, _rows_max(sequences))


def _rows_max(sequences: Several[Sequence]) -> int:
    return sum(sequence.place_rows for sequence in sequences)


def _handed_out(logits: Tensor, sequences: Several[Sequence | None]) -> dict[int, str | Exception]:
    """What each sequence makes of its row, by the sequence's id; the only wait of a step."""
    rows = found(logits, [one is not None and one.needs_logits for one in sequences])
    pairs = zip(sequences, rows, strict=True)
    return {id(one): _accepted(one, row) for one, row in pairs if one is not None}


def _accepted(sequence: Sequence, next_token: Found) -> str | Exception:
    try:
        return sequence.accept(next_token)
    # Whatever it was, it is one sequence's and not the batch's.
    except Exception as error:  # noqa: BLE001
        return error
