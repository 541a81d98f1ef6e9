"""A build: prefill a document, let the policy choose, keep the chosen rows, free the rest.

A build is a generator of bounded work items, so that questions are answered between them and
it can be abandoned at any of them. How a text is cut into slices depends on its length alone,
whatever else is running: the same document gives the same cache, bit for bit, when it is rebuilt.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.attention import dense_prefill
from kvkeep_kernels.compaction import Selection, keep_all, select
from kvkeep_kernels.layout import ContextRows
from kvkeep_service.auto_ratio import AutoRatio
from kvkeep_service.engine.architecture import ModelShape
from kvkeep_service.engine.cache import FullCache, ResidentContext
from kvkeep_service.engine.checking import check
from kvkeep_service.engine.fidelity import Meter, sample_of
from kvkeep_service.engine.gathering import kept_rows
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.windows import with_windows
from kvkeep_service.ports import Fidelity, Quantization

SLICE_TOKENS = 576
"""Most tokens that go through a layer at a time.

A work item is one slice in one layer, which bounds how long a running answer waits for a build;
shorter slices keep several threads less busy. A chunk of 1,024 and what asks to repeat it are two.
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a build is: stage, and fraction of the whole build's work in [0, 1]."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """A document as the model sees it.

    prefix_ids come before it and are never evicted; protected marks the document's own tokens
    (bool [document tokens]) that must stay too.
    """

    prefix_ids: Sequence[int]
    ids: Sequence[int]
    protected: Tensor

    @property
    def num_prefix(self) -> int:
        """Tokens before the document."""
        return len(self.prefix_ids)

    @property
    def num_tokens(self) -> int:
        """N: prefix and document; the position at which questions start."""
        return len(self.prefix_ids) + len(self.ids)


@dataclass(frozen=True, slots=True)
class BuiltCache:
    """What a build gives: the resident context, how it was selected, and where time went.

    ``fidelity`` is None where nothing was measured. ``chosen`` is the ratio that the build was to
    find, None when it was given one.
    """

    context: ResidentContext
    selection: Selection
    policy_applied: str
    timings: dict[str, float]
    fidelity: Fidelity | None = None
    chosen: float | None = None


Parameters = Mapping[str, str | int | float]


class PrefillWatcher(Protocol):
    """What a policy keeps of the queries of the prefill, to need no pass of its own."""

    def see_queries(self, layer: int, first: int, q: Tensor, scale: float) -> None:
        """Take one slice's rotated queries in one layer, in the order of positions.

        Shapes: q [num_q_heads, tokens, head_dim], of the tokens from ``first`` on; ``scale`` is
            what the layer multiplies logits by. Layers that do not evict are not shown. Modifies
            the watcher only.
        """
        ...


class ScoringPolicy(Protocol):
    """A rule that says how much each document token matters to each head; serves one build.

    What it scores never depends on the ratio: one order of all rows serves every ratio.
    """

    name: str
    version: int
    """Goes up with every change after which the same document may get other scores."""
    repeats: bool
    """Whether scoring takes the document through the model once more."""

    @property
    def watcher(self) -> PrefillWatcher | None:
        """What is to see the prefill's queries; None where scores need nothing of them."""
        ...

    @property
    def parameters(self) -> Parameters:
        """What else decides the scores; with name and version, part of the cache's identity."""
        ...

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """Yield the fraction done after each bounded work item; return the scores.

        Returns [evicting layers, kv_heads, document tokens] fp32, finite, higher is kept.
        """
        ...


def build(
    model: LanguageModel,
    document: DocumentTokens,
    *,
    policy: ScoringPolicy | None,
    ratios: Sequence[float] | AutoRatio,
    quantization: Quantization = "none",
    repeat_prompt: Sequence[int] = (),
) -> Generator[Progress, None, BuiltCache]:
    """Read a document and compress its cache to the highest of ``ratios`` (fractions kept).

    With no policy every row stays. Yields after each work item; the full cache is freed layer
    by layer while the kept rows are gathered. Before that it is measured what they lose, with
    ``repeat_prompt``, the token ids that ask for a repetition.
    Raises: RatioMissed, when the selection does not keep what was asked; OutOfRange, when the
        model gave rows that cannot be quantised; LossUnreachable.
    """
    started = time.perf_counter()
    shape = model.shape
    cache = FullCache(shape, document.num_tokens, dtype=model.dtype, device=model.device)
    share = 0.5 if policy else 0.95
    watcher = policy.watcher if policy else None
    for fraction in prefill(model, cache, document, watcher):
        yield Progress("prefill", share * fraction)
    prefilled = time.perf_counter()
    ranking = yield from _ranking(model, cache, document, policy)
    scored = time.perf_counter()
    checked = yield from _checked(
        model, cache, document, ranking, ratios, quantization, repeat_prompt
    )
    measured = time.perf_counter()
    selection = checked.selection
    layers: list[ContextRows] = []
    for layer in range(shape.num_layers):
        layers.append(kept_rows(cache, selection, layer, document.num_tokens, quantization))
        cache.release(layer)
        yield Progress("compacting", 0.95 + 0.05 * (layer + 1) / shape.num_layers)
    context = ResidentContext(
        tuple(layers), selection.counts, selection.ratios, document.num_tokens
    )
    timings = {
        "prefill_s": prefilled - started,
        "score_s": scored - prefilled,
        "fidelity_s": measured - scored,
        "compact_s": time.perf_counter() - measured,
    }
    applied = policy.name if policy else "none"
    return BuiltCache(context, selection, applied, timings, checked.fidelity, checked.chosen)


class PrefillPass:
    """Document tokens from ``first`` on: written to the full cache, attending causally."""

    def __init__(
        self,
        cache: FullCache,
        first: int,
        last_layer: int,
        watcher: PrefillWatcher | None = None,
    ) -> None:
        self._cache = cache
        self._first = first
        self._last_layer = last_layer
        self._watcher = watcher

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, batch 1. Modifies the full cache."""
        cache, window = self._cache, self._cache.window(layer)
        if self._watcher is not None and window is None:
            self._watcher.see_queries(layer, self._first, q[0], scale)
        cache.write(layer, self._first, k[0], v[0])
        if layer == self._last_layer:
            # Nobody reads what comes of it.
            return q
        own = cache.visible(layer, self._first + k.shape[2])
        return dense_prefill(q[0], own, scale=scale, window=window).out[None]


def slices(total: int) -> list[range]:
    """Cut ``total`` tokens into as few slices of at most ``SLICE_TOKENS`` as there can be.

    They are equally long but for one token: a short one would cost more than its share.
    """
    count = -(-total // SLICE_TOKENS)
    return [range(total * i // count, total * (i + 1) // count) for i in range(count)]


def prefill(
    model: LanguageModel,
    cache: FullCache,
    document: DocumentTokens,
    watcher: PrefillWatcher | None,
) -> Generator[float, None, None]:
    """Fill a cache with the whole document, yielding the fraction done after each slice."""
    ids = torch.tensor([[*document.prefix_ids, *document.ids]])
    last_layer = model.shape.num_layers - 1
    for piece in slices(ids.shape[1]):
        positions = torch.arange(piece.start, piece.stop)[None]
        forward = model.begin(ids[:, piece.start : piece.stop], positions)
        attention = PrefillPass(cache, piece.start, last_layer, watcher)
        for layer in range(last_layer):
            forward.run_layer(layer, attention)
            yield (piece.start + len(piece) * (layer + 1) / (last_layer + 1)) / ids.shape[1]
        forward.attend_only(last_layer, attention)
        yield piece.stop / ids.shape[1]


@dataclass(frozen=True, slots=True)
class _Ranking:
    """All rows of a document, ranked; ``scores`` None keeps every one.

    Shapes: scores [evicting layers, heads, tokens] fp32; protected [tokens] bool.
    """

    shape: ModelShape
    policy: ScoringPolicy | None
    scores: Tensor | None
    protected: Tensor

    @property
    def num_repeated(self) -> int:
        """Tokens that ranking has taken through the model once more."""
        is_repeated = self.policy is not None and self.policy.repeats
        return len(self.protected) if is_repeated else 0

    def select(self, ratios: Sequence[float]) -> Selection:
        """Cut at these ratios. Raises: RatioMissed."""
        if self.scores is None:
            return self.everything()
        selection = select(self.scores, self.protected, ratios)
        _check_achieved(selection, ratios[-1])
        return with_windows(selection, self.shape, len(self.protected))

    def everything(self) -> Selection:
        """Every row that a later token may see."""
        num_tokens, fixed = len(self.protected), int(self.protected.sum())
        shape = self.shape
        whole = keep_all(len(shape.evicting), shape.num_kv_heads, num_tokens, fixed)
        return with_windows(whole, shape, num_tokens)


def _ranking(
    model: LanguageModel,
    cache: FullCache,
    document: DocumentTokens,
    policy: ScoringPolicy | None,
) -> Generator[Progress, None, _Ranking]:
    shape, num_prefix = model.shape, document.num_prefix
    protected = torch.ones(document.num_tokens, dtype=torch.bool)
    protected[num_prefix:] = document.protected
    if policy is None:
        return _Ranking(shape, None, None, protected)
    scoring = policy.score(model, cache, document)
    while True:
        try:
            yield Progress("scoring", 0.5 + 0.4 * next(scoring))
        except StopIteration as finished:
            scores: Tensor = finished.value
            break
    size = (len(shape.evicting), shape.num_kv_heads, document.num_tokens)
    whole = torch.zeros(size, device=scores.device)
    whole[:, :, num_prefix:] = scores
    return _Ranking(shape, policy, whole, protected)


@dataclass(frozen=True, slots=True)
class _Checked:
    selection: Selection
    fidelity: Fidelity | None
    chosen: float | None


def _checked(
    model: LanguageModel,
    cache: FullCache,
    document: DocumentTokens,
    ranking: _Ranking,
    ratios: Sequence[float] | AutoRatio,
    quantization: Quantization,
    repeat_prompt: Sequence[int],
) -> Generator[Progress, None, _Checked]:
    """Measure what is lost, and find the ratio where none was given."""
    auto = ratios if isinstance(ratios, AutoRatio) else None
    selection = ranking.select(ratios.candidates if isinstance(ratios, AutoRatio) else ratios)
    everything, num_tokens = ranking.everything(), document.num_tokens
    meter = Meter(
        model,
        num_tokens,
        selection,
        sample_of(document.ids, num_tokens + ranking.num_repeated, repeat_prompt),
        full=lambda layer: kept_rows(cache, everything, layer, num_tokens, "none"),
        kept=lambda layer: kept_rows(cache, selection, layer, num_tokens, quantization),
        is_exact=quantization == "none",
    )
    checking = check(meter, auto)
    while True:
        try:
            next(checking)
        except StopIteration as finished:
            chosen: float | None = finished.value
            break
        yield Progress("checking", 0.92)
    if auto is not None and chosen is not None:
        selection = ranking.select(auto.cuts(chosen))
    return _Checked(selection, meter.fidelity(), chosen)


class RatioMissed(RuntimeError):
    """The selection kept another share than asked: a scorer that silently did nothing."""


def _check_achieved(selection: Selection, ratio: float) -> None:
    heads = selection.counts.shape[1] * selection.counts.shape[2]
    # Rounding moves the count by half a row; the floor keeps one row per head.
    allowed = max(0.5, heads - ratio * selection.num_eligible)
    if abs(selection.num_selected - ratio * selection.num_eligible) > allowed:
        raise RatioMissed(f"kept {selection.ratio_achieved:.5f} of the rows, asked {ratio}")
