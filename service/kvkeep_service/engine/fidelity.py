"""What eviction loses, measured while the full cache is still there.

Pieces of the document are laid one after the other behind it, from position N on, where a
question would be, and given as they are (teacher-forced): once over all rows, and once over the
rows that a ratio keeps. The loss of a ratio is what its rows make the document's own words less
likely by. The same pieces serve every ratio, and a rebuild.

A prompt asks for the repetition, as a question would, and ends the user's turn: without it, few
rows seemed to do better than all. The first tokens of each piece are not counted: there the model
has yet to find the place, from all rows as from few.
"""

import hashlib
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep_kernels.compaction import Selection
from kvkeep_kernels.layout import ContextRows
from kvkeep_service.auto_ratio import cautious_losses, margin
from kvkeep_service.engine.cache import ContextView, Tail, leads
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.passes import QuestionPass
from kvkeep_service.ports import Fidelity, RatioFidelity

SPAN_TOKENS = 44
LEAD_TOKENS = 12
"""Tokens at the beginning of each span that are not counted."""
MAX_SPANS = 10
"""More would measure more exactly than ratios differ; and one forward is one work item."""
ROWS_SHARE = 0.11
"""Rows of all measuring forwards together, per token that a build reads. A row costs 0.9 of a
build's (bench/NOTES.md): so a tenth of its time."""
_FEW, _MANY = 3, 5
"""Forwards, the one over all rows included: enough to try two ratios, and to search."""
_ENOUGH_SPANS = 7
"""From here on, another ratio tells more than another span."""
USUAL_SPREAD = 1.0
LEAST_SPREAD = 0.02
"""Standard deviation of a span's loss as a share of the loss, and in nats: what few spans show of
it themselves is often too little."""
_LOGIT_ROWS = 64

Gather = Callable[[int], ContextRows]
"""One layer's rows by its number, in new buffers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What is read: a prompt, and spans of the document, one after the other.

    ids [rows + 1]; ``counted``: the rows whose next token counts, as many of each span.
    ``num_ratios``: how many ratios may be measured with it.
    """

    ids: tuple[int, ...]
    counted: tuple[int, ...]
    num_spans: int
    num_ratios: int

    @property
    def num_rows(self) -> int:
        """Rows of one forward over it."""
        return len(self.ids) - 1


def sample_of(ids: Sequence[int], num_read: int, prompt: Sequence[int] = ()) -> Sample | None:
    """Choose spans of a document's token ids, evenly spread, by nothing but the ids.

    ``num_read``: tokens that the build reads, the document again for each time it is repeated.
    None for a document that is too short for one span, read twice, to be affordable.
    """
    rows = int(ROWS_SHARE * num_read)
    spans_of = {count: (rows // count - len(prompt)) // SPAN_TOKENS for count in (2, _FEW, _MANY)}
    forwards = _MANY if spans_of[_MANY] >= _ENOUGH_SPANS else _FEW if spans_of[_FEW] > 0 else 2
    num_spans = min(MAX_SPANS, spans_of[forwards])
    if num_spans < 1:
        return None
    digest = hashlib.sha256(repr(list(ids)).encode()).digest()
    chance = random.Random(int.from_bytes(digest[:8], "big"))
    stretch = (len(ids) - SPAN_TOKENS) / num_spans
    starts = [int((index + chance.random()) * stretch) for index in range(num_spans)]
    # In the order of the text, a span would often foretell the next one.
    chance.shuffle(starts)
    chained = [token for start in starts for token in ids[start : start + SPAN_TOKENS]]
    first = len(prompt)
    counted = tuple(
        first + place - 1 for place in range(len(chained)) if place % SPAN_TOKENS >= LEAD_TOKENS
    )
    num_ratios = rows // (first + len(chained)) - 1
    return Sample((*prompt, *chained), counted, num_spans, num_ratios)


class Meter:
    """Measures what the ratios of one selection lose; one work item per layer of its forwards."""

    def __init__(
        self,
        model: LanguageModel,
        num_tokens: int,
        selection: Selection,
        sample: Sample | None,
        *,
        full: Gather,
        kept: Gather,
        is_exact: bool,
        remainders: Sequence[Tensor] | None = None,
    ) -> None:
        """``full`` gathers every row as it is, ``kept`` the selection's as they will be stored.

        ``remainders``: the selection's, as in ``ResidentContext``.
        ``sample`` None: nothing can be measured. ``is_exact``: the two are the same at ratio 1,
        which then loses nothing by definition.
        """
        self._model = model
        self._sample = sample
        self._num_tokens = num_tokens
        self._selection = selection
        self._full, self._kept = full, kept
        self._is_exact = is_exact
        self._remainders = remainders
        self._reference: _Reading | None = None
        self._measured: dict[float, RatioFidelity] = {}
        # Highest first: what questions are read at by default matters most.
        self.ratios = tuple(
            ratio for ratio in reversed(selection.ratios) if not self._is_known(ratio)
        )

    def measure(self, ratios: Sequence[float]) -> Generator[None, None, None]:
        """Measure ratios of the selection, at most ``num_left``. Yields after each work item.

        Modifies: this meter, which knows them from then on.
        """
        if self._sample is None or not ratios:
            return
        wanted: list[float | None] = list(ratios)
        if self._reference is None:
            wanted.insert(0, None)
        together = max(1, MAX_SPANS // self._sample.num_spans)
        for first in range(0, len(wanted), together):
            some = wanted[first : first + together]
            readings = yield from self._read(self._sample, some)
            for ratio, reading in zip(some, readings, strict=True):
                if ratio is None:
                    self._reference = reading
                    continue
                assert self._reference is not None, "the full cache is read first"
                measured = _compared(ratio, reading, self._reference, self._sample.num_spans)
                self._measured[ratio] = measured

    @property
    def num_left(self) -> int:
        """How many more ratios may be measured."""
        return 0 if self._sample is None else self._sample.num_ratios - len(self._measured)

    def fidelity(self) -> Fidelity | None:
        """Everything that was measured; None before anything was."""
        if self._sample is None or self._reference is None:
            return None
        nll_full = float(self._reference.nll.mean())
        measured = dict(self._measured)
        if self._is_exact and 1.0 in self._selection.ratios:
            measured[1.0] = RatioFidelity(1.0, nll_full, 1.0, 0.0)
        return Fidelity(
            spans=self._sample.num_spans,
            tokens=len(self._sample.counted),
            nll_full=nll_full,
            ratios=tuple(measured[ratio] for ratio in sorted(measured)),
        )

    def cautious_losses(self) -> dict[float, float]:
        """What each known ratio is taken to lose at most, in nats per token."""
        return cautious_losses(
            self.fidelity(), is_exact=self._is_exact, remainder=self._remainders is not None
        )

    @property
    def margin(self) -> float:
        """Standard errors that count in ``cautious_losses``."""
        return margin(remainder=self._remainders is not None)

    def _is_known(self, ratio: float) -> bool:
        return ratio in self._measured or (self._is_exact and ratio == 1.0)

    def _read(
        self, sample: Sample, ratios: Sequence[float | None]
    ) -> Generator[None, None, list["_Reading"]]:
        """One forward over the same tokens for each ratio; None is the full cache.

        Yields after each layer, and after each piece of the logits.
        """
        model = self._model
        kept = _OneLayer(self._kept)
        passes = []
        for ratio in ratios:
            view = self._view(ratio, kept)
            tail = Tail(model.shape, dtype=model.dtype, device=model.device, num_lead=view.num_lead)
            tail.reserve(sample.num_rows)
            passes.append(QuestionPass(view, tail))
        ids = torch.tensor([sample.ids[:-1]]).repeat(len(ratios), 1)
        positions = torch.arange(self._num_tokens, self._num_tokens + sample.num_rows)
        forward = model.begin(ids, positions.repeat(len(ratios), 1))
        attention = SideBySide(passes)
        for layer in range(model.shape.num_layers):
            forward.run_layer(layer, attention)
            yield
        readings = []
        for hidden in forward.finish():
            reading = yield from _judged(model, sample, hidden)
            readings.append(reading)
        return readings

    def _view(self, ratio: float | None, kept: "_OneLayer") -> ContextView:
        if ratio is None:
            return ContextView(_OneLayer(self._full), self._num_tokens, 1.0)
        band = self._selection.ratios.index(ratio)
        lengths = self._selection.counts[: band + 1].sum(dim=0, dtype=torch.int32)
        lead = leads(self._remainders, band, ratio)
        return ContextView(_Shortened(kept, lengths), self._num_tokens, ratio, lead=lead)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Of each counted token its loss (nats) and what was thought most likely: [counted] each."""

    nll: Tensor
    best: Tensor


def _judged(
    model: LanguageModel, sample: Sample, hidden: Tensor
) -> Generator[None, None, _Reading]:
    """What the counted rows say of their next tokens. hidden [rows, hidden size]."""
    nll, best = [], []
    counted = torch.tensor(sample.counted)
    following = torch.tensor(sample.ids)[counted + 1]
    # In pieces: a large vocabulary makes logits larger than all else here.
    for rows, wanted in zip(counted.split(_LOGIT_ROWS), following.split(_LOGIT_ROWS), strict=True):
        logits = model.logits(hidden[rows.to(hidden.device)])
        target = wanted.to(logits.device)
        nll.append(torch.nn.functional.cross_entropy(logits, target, reduction="none").cpu())
        best.append(logits.argmax(dim=-1).cpu())
        yield
    return _Reading(torch.cat(nll).double(), torch.cat(best))


def _compared(ratio: float, kept: _Reading, full: _Reading, num_spans: int) -> RatioFidelity:
    # Tokens of one span go wrong together, so spans are counted and not tokens.
    increase = (kept.nll - full.nll).reshape(num_spans, -1).mean(dim=1)
    spread = float(increase.std(unbiased=True)) if num_spans > 1 else 0.0
    usual = max(LEAST_SPREAD, USUAL_SPREAD * abs(float(increase.mean())))
    return RatioFidelity(
        ratio=ratio,
        nll_kept=float(kept.nll.mean()),
        top1_agreement=float((kept.best == full.best).double().mean()),
        loss_error=max(spread, usual) / num_spans**0.5,
    )


class SideBySide:
    """The same tokens after several states of one context, each with a tail of its own."""

    def __init__(self, passes: Sequence[QuestionPass]) -> None:
        self._passes = passes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, one pass per row of the batch. Modifies their tails."""
        return torch.cat(
            [
                own.attend(layer, q[i : i + 1], k[i : i + 1], v[i : i + 1], scale)
                for i, own in enumerate(self._passes)
            ]
        )


class _OneLayer:
    """A cache whose layers are gathered when they are read; one is held at a time.

    So measuring takes the memory of one layer, however much is kept.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._held: tuple[int, ContextRows] | None = None

    def __getitem__(self, layer: int) -> ContextRows:
        if self._held is None or self._held[0] != layer:
            self._held = (layer, self._gather(layer))
        return self._held[1]


class _Shortened:
    """The same cache at a lower ratio: shorter runs. lengths [layers, heads] int32."""

    def __init__(self, layers: _OneLayer, lengths: Tensor) -> None:
        self._layers = layers
        self._lengths = lengths

    def __getitem__(self, layer: int) -> ContextRows:
        rows = self._layers[layer]
        return rows.truncated(self._lengths[layer].to(rows.start.device))
