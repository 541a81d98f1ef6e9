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

from kvkeep_kernels.compaction import Selection, keep_all, select, shared_out
from kvkeep_kernels.layout import ContextRows
from kvkeep_kernels.remainder import Clusters
from kvkeep_service.auto_ratio import AutoRatio
from kvkeep_service.engine.architecture import ModelShape
from kvkeep_service.engine.cache import FullCache, ResidentContext
from kvkeep_service.engine.checking import check
from kvkeep_service.engine.fidelity import Meter, sample_of
from kvkeep_service.engine.gathering import kept_rows
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens, PrefillWatcher, prefill
from kvkeep_service.engine.remainders import QuerySample, Remainders, cluster, fit
from kvkeep_service.engine.windows import with_windows
from kvkeep_service.ports import Fidelity, Quantization


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a build is: stage, and fraction of the whole build's work in [0, 1]."""

    stage: str
    fraction: float


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
    def sample(self) -> QuerySample | None:
        """Queries of its pass, once it has scored, to fit remainders to; None for no remainders."""
        ...

    @property
    def parameters(self) -> Parameters:
        """What else decides the cache; with name and version, part of its identity."""
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
        tuple(layers),
        selection.counts,
        selection.ratios,
        document.num_tokens,
        remainders=checked.remainders,
    )
    timings = {
        "prefill_s": prefilled - started,
        "score_s": scored - prefilled - ranking.cluster_s,
        "remainder_s": ranking.cluster_s + checked.remainder_s,
        "fidelity_s": measured - scored - checked.remainder_s,
        "compact_s": time.perf_counter() - measured,
    }
    applied = policy.name if policy else "none"
    return BuiltCache(context, selection, applied, timings, checked.fidelity, checked.chosen)


@dataclass(frozen=True, slots=True)
class _Ranking:
    """All rows of a document, ranked; ``scores`` None keeps every one.

    Shapes: scores [evicting layers, heads, tokens] fp32; protected [tokens] bool; clusters
        [layers, heads, tokens] uint8, of rows that are to leave remainders, None for none, and
        ``cluster_s`` the seconds that finding them took.
    """

    shape: ModelShape
    policy: ScoringPolicy | None
    scores: Tensor | None
    protected: Tensor
    clusters: Tensor | None = None
    cluster_s: float = 0.0

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
    if policy.sample is None:
        return _Ranking(shape, policy, whole, protected)
    started = time.perf_counter()
    clustering = cluster(cache, policy.sample, shape.num_layers, document.num_tokens)
    while True:
        try:
            next(clustering)
        except StopIteration as finished:
            clusters: Clusters = finished.value
            break
        yield Progress("scoring", 0.9)
    # A row near what would stand for it can be spared, however much it is looked at. And what
    # stands for nearly all of a head does not do for each of its rows.
    whole = shared_out(whole * clusters.loss, protected)
    spent = time.perf_counter() - started
    return _Ranking(shape, policy, whole, protected, clusters.of, spent)


@dataclass(frozen=True, slots=True)
class _Checked:
    """``remainder_s``: seconds of fitting remainders, which fall between those of measuring."""

    selection: Selection
    remainders: Remainders | None
    fidelity: Fidelity | None
    chosen: float | None
    remainder_s: float


def _checked(
    model: LanguageModel,
    cache: FullCache,
    document: DocumentTokens,
    ranking: _Ranking,
    ratios: Sequence[float] | AutoRatio,
    quantization: Quantization,
    repeat_prompt: Sequence[int],
) -> Generator[Progress, None, _Checked]:
    """Measure what is lost, and find the ratio where none was given.

    What stands for evicted rows is fitted first: it is measured with the rest.
    """
    sample = ranking.policy.sample if ranking.policy else None
    remainder_s = 0.0

    def remainders_of(selection: Selection) -> Generator[Progress, None, Remainders | None]:
        nonlocal remainder_s
        if sample is None or ranking.clusters is None:
            return None
        started = time.perf_counter()
        fitting = fit(cache, selection, sample, ranking.clusters, document.num_tokens)
        while True:
            try:
                next(fitting)
            except StopIteration as finished:
                remainders: Remainders = finished.value
                remainder_s += time.perf_counter() - started
                return remainders
            yield Progress("checking", 0.91)

    auto = ratios if isinstance(ratios, AutoRatio) else None
    selection = ranking.select(ratios.candidates if isinstance(ratios, AutoRatio) else ratios)
    remainders = yield from remainders_of(selection)
    everything, num_tokens = ranking.everything(), document.num_tokens
    meter = Meter(
        model,
        num_tokens,
        selection,
        sample_of(document.ids, num_tokens + ranking.num_repeated, repeat_prompt),
        full=lambda layer: kept_rows(cache, everything, layer, num_tokens, "none"),
        kept=lambda layer: kept_rows(cache, selection, layer, num_tokens, quantization),
        is_exact=quantization == "none",
        remainders=remainders,
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
        remainders = yield from remainders_of(selection)
    return _Checked(selection, remainders, meter.fidelity(), chosen, remainder_s)


class RatioMissed(RuntimeError):
    """The selection kept another share than asked: a scorer that silently did nothing."""


def _check_achieved(selection: Selection, ratio: float) -> None:
    heads = selection.counts.shape[1] * selection.counts.shape[2]
    # Rounding moves the count by half a row; the floor keeps one row per head.
    allowed = max(0.5, heads - ratio * selection.num_eligible)
    if abs(selection.num_selected - ratio * selection.num_eligible) > allowed:
        raise RatioMissed(f"kept {selection.ratio_achieved:.5f} of the rows, asked {ratio}")
