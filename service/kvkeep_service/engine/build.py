"""A build: prefill a document, let the policy choose, keep the chosen rows, free the rest.

A build is a generator of bounded work items, so that questions are answered between them and
it can be abandoned at any of them. How a text is cut into slices depends on its length alone,
whatever else is running: the same document gives the same cache, bit for bit, when it is rebuilt.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.attention import dense_prefill
from kvkeep_kernels.compaction import Selection, compact, keep_all, select
from kvkeep_kernels.layout import ContextRows, DenseKV, Placement, RaggedKV
from kvkeep_kernels.quantize import channel_mean, quantize_kv
from kvkeep_service.engine.cache import FullCache, ResidentContext
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.windows import with_windows
from kvkeep_service.ports import Quantization

SLICE_TOKENS = 512
"""Most tokens that go through a layer at a time.

A work item is one slice in one layer, which bounds how long a running answer waits for a build;
shorter slices keep several threads less busy.
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
    """What a build gives: the resident context, how it was selected, and where time went."""

    context: ResidentContext
    selection: Selection
    policy_applied: str
    timings: dict[str, float]


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
    ratios: Sequence[float],
    quantization: Quantization = "none",
) -> Generator[Progress, None, BuiltCache]:
    """Read a document and compress its cache to the highest of ``ratios`` (fractions kept).

    With no policy every row stays. Yields after each work item; the full cache is freed layer
    by layer while the kept rows are gathered.
    Raises: RatioMissed, when the selection does not keep what was asked; OutOfRange, when the
        model gave rows that cannot be quantised.
    """
    started = time.perf_counter()
    shape = model.shape
    cache = FullCache(shape, document.num_tokens, dtype=model.dtype, device=model.device)
    share = 0.5 if policy else 0.95
    watcher = policy.watcher if policy else None
    for fraction in prefill(model, cache, document, watcher):
        yield Progress("prefill", share * fraction)
    prefilled = time.perf_counter()
    evicting = yield from _selection(model, cache, document, policy, ratios)
    selection = with_windows(evicting, shape, document.num_tokens)
    scored = time.perf_counter()
    lengths = selection.counts.sum(dim=0, dtype=torch.int32)
    layers: list[ContextRows] = []
    for layer in range(shape.num_layers):
        rows = cache.lasting(layer, document.num_tokens)
        positions = selection.positions[layer]
        kept = compact(rows, positions - (document.num_tokens - rows.tokens), lengths[layer])
        if cache.window(layer) is not None:
            kept = replace(kept, placement=Placement(positions.to(kept.start), document.num_tokens))
        layers.append(_quantized(kept, rows, quantization))
        cache.release(layer)
        yield Progress("compacting", 0.95 + 0.05 * (layer + 1) / shape.num_layers)
    context = ResidentContext(
        tuple(layers), selection.counts, selection.ratios, document.num_tokens
    )
    timings = {
        "prefill_s": prefilled - started,
        "score_s": scored - prefilled,
        "compact_s": time.perf_counter() - scored,
    }
    return BuiltCache(context, selection, policy.name if policy else "none", timings)


def _quantized(kept: RaggedKV, full: DenseKV, quantization: Quantization) -> ContextRows:
    """Kept rows as they are stored, and read by every question.

    Channel means are those of all rows, not of the kept ones: so what a row becomes does not
    depend on the ratio that others asked for.
    """
    match quantization:
        case "none":
            return kept
        case "int8" | "fp8":
            return quantize_kv(kept, quantization)
        case "int4":
            return quantize_kv(kept, quantization, channel_mean(full.k))


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


def _selection(
    model: LanguageModel,
    cache: FullCache,
    document: DocumentTokens,
    policy: ScoringPolicy | None,
    ratios: Sequence[float],
) -> Generator[Progress, None, Selection]:
    shape, num_prefix = model.shape, document.num_prefix
    fixed = num_prefix + int(document.protected.sum())
    if policy is None:
        return keep_all(len(shape.evicting), shape.num_kv_heads, document.num_tokens, fixed)
    scoring = policy.score(model, cache, document)
    while True:
        try:
            yield Progress("scoring", 0.5 + 0.45 * next(scoring))
        except StopIteration as finished:
            scores: Tensor = finished.value
            break
    size = (len(shape.evicting), shape.num_kv_heads, document.num_tokens)
    whole = torch.zeros(size, device=scores.device)
    whole[:, :, num_prefix:] = scores
    protected = torch.ones(document.num_tokens, dtype=torch.bool)
    protected[num_prefix:] = document.protected
    selection = select(whole, protected, ratios)
    _check_achieved(selection, ratios[-1])
    return selection


class RatioMissed(RuntimeError):
    """The selection kept another share than asked: a scorer that silently did nothing."""


def _check_achieved(selection: Selection, ratio: float) -> None:
    heads = selection.counts.shape[1] * selection.counts.shape[2]
    # Rounding moves the count by half a row; the floor keeps one row per head.
    allowed = max(0.5, heads - ratio * selection.num_eligible)
    if abs(selection.num_selected - ratio * selection.num_eligible) > allowed:
        raise RatioMissed(f"kept {selection.ratio_achieved:.5f} of the rows, asked {ratio}")
