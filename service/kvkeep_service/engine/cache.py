"""The KV that the engine owns: a document's full cache, a query's tail, a resident context."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.layout import ContextRows, DenseKV, LogitBounds
from kvkeep_service.engine.architecture import ModelShape
from kvkeep_service.engine.arrival import LayerArrival

_MIN_CAPACITY = 64


class FullCache:
    """The uncompressed KV of a document while it is built: per layer [heads, tokens, head_dim].

    Of a layer with a sliding window only what the next token sees is held, and the rows last
    written. Both kinds are written in order.
    """

    def __init__(
        self, shape: ModelShape, tokens: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate every layer at once, so that running out of memory shows before the work."""
        self._shape = shape

        def room(layer: int) -> Tensor:
            rows = tokens if shape.window(layer) is None else 0
            size = (2, shape.num_kv_heads, rows, shape.head_dim)
            return torch.empty(size, dtype=dtype, device=device)

        self._layers: list[Tensor | None] = [room(layer) for layer in range(shape.num_layers)]

    def write(self, layer: int, first: int, k: Tensor, v: Tensor) -> None:
        """Store rows [heads, tokens, head_dim] at token ``first`` and on. Modifies the cache."""
        kv = self._kv(layer)
        if self._shape.window(layer) is not None:
            kept = self.lasting(layer, first)
            self._layers[layer] = torch.stack(
                [torch.cat([kept.k, k], dim=1), torch.cat([kept.v, v], dim=1)]
            )
            return
        kv[0, :, first : first + k.shape[1]] = k
        kv[1, :, first : first + v.shape[1]] = v

    def rows(self, layer: int, first: int, last: int) -> DenseKV:
        """Tokens ``first`` to ``last`` (exclusive) of one layer without a window, as views."""
        assert self._shape.window(layer) is None, f"layer {layer} does not hold every token"
        kv = self._kv(layer)
        return DenseKV(kv[0, :, first:last], kv[1, :, first:last])

    def window(self, layer: int) -> int | None:
        """As ``ModelShape.window``."""
        return self._shape.window(layer)

    def visible(self, layer: int, last: int) -> DenseKV:
        """What the rows written last, up to token ``last``, see: theirs at the end, as views."""
        if self._shape.window(layer) is None:
            return self.rows(layer, 0, last)
        kv = self._kv(layer)
        return DenseKV(kv[0], kv[1])

    def lasting(self, layer: int, last: int) -> DenseKV:
        """Of the tokens written, up to ``last``, those that later ones may see, as views."""
        window = self._shape.window(layer)
        if window is None:
            return self.rows(layer, 0, last)
        kv = self._kv(layer)
        first = max(0, kv.shape[2] - (window - 1))
        return DenseKV(kv[0, :, first:], kv[1, :, first:])

    def release(self, layer: int) -> None:
        """Free one layer; reading it afterwards is a programming error."""
        self._layers[layer] = None

    def _kv(self, layer: int) -> Tensor:
        kv = self._layers[layer]
        assert kv is not None, f"layer {layer} was released"
        return kv


class Tail:
    """The KV of one query, or of one repeat input: private, grown by doubling, short-lived.

    A forward writes every layer behind ``tokens`` and then calls ``extend`` once, so a forward
    that fails half-way leaves the tail as it was. ``num_lead`` rows come before the first token's,
    what stands for evicted rows of the context: the first forward writes them.
    """

    def __init__(
        self, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, num_lead: int = 0
    ) -> None:
        """Start without a token."""
        self._shape = shape
        self._dtype, self._device = dtype, device
        self._kv = self._allocate(_MIN_CAPACITY)
        self.num_lead = num_lead
        self.tokens = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of its buffers, room that is not used yet included."""
        return self._kv.nbytes

    @property
    def length(self) -> int:
        """Rows of a head: those in front, and one for each token."""
        return self.num_lead + self.tokens

    @property
    def buffer(self) -> Tensor:
        """Its rows and what room it has, [layers, K and V, heads, capacity, head_dim].

        Growing replaces it.
        """
        return self._kv

    def copied(self, tokens: int) -> "Tail":
        """The rows of its first ``tokens`` tokens in a tail of its own, with room for no more."""
        copy = Tail.__new__(Tail)
        copy._shape, copy._dtype, copy._device = self._shape, self._dtype, self._device
        rows = self.num_lead + tokens
        copy._kv = self._kv[:, :, :, :rows].clone(memory_format=torch.contiguous_format)
        copy.num_lead, copy.tokens = self.num_lead, tokens
        return copy

    def bounds(self, layer: int) -> LogitBounds:
        """As ``ModelShape.bounds``."""
        return self._shape.bounds(layer)

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more rows per head. Modifies capacity only."""
        needed, capacity = self.length + tokens, self._kv.shape[3]
        if needed > capacity:
            grown = self._allocate(max(needed, 2 * capacity))
            grown[:, :, :, : self.length] = self._kv[:, :, :, : self.length]
            self._kv = grown

    def write_lead(self, layer: int, lead: DenseKV) -> None:
        """Store the rows in front of the first token [heads, num_lead, head_dim]."""
        self._kv[layer, 0, :, : self.num_lead] = lead.k
        self._kv[layer, 1, :, : self.num_lead] = lead.v

    def write(self, layer: int, k: Tensor, v: Tensor) -> DenseKV:
        """Store new rows [heads, tokens, head_dim] and return the whole tail with them."""
        end = self.length + k.shape[1]
        self._kv[layer, 0, :, self.length : end] = k
        self._kv[layer, 1, :, self.length : end] = v
        return DenseKV(self._kv[layer, 0, :, :end], self._kv[layer, 1, :, :end])

    def extend(self, tokens: int) -> None:
        """Count the rows that every layer has now written."""
        self.tokens += tokens

    @property
    def device(self) -> torch.device:
        """Where its rows are."""
        return self._device

    def rows(self, first: int) -> Tensor:
        """Rows from number ``first`` on, as a view [layers, K and V, heads, rows, head_dim]."""
        return self._kv[:, :, :, first : self.length]

    def append(self, kv: Tensor) -> None:
        """Store and count rows [layers, K and V, heads, tokens, head_dim], for which is room."""
        self._kv[:, :, :, self.length : self.length + kv.shape[3]] = kv
        self.tokens += kv.shape[3]

    def _allocate(self, capacity: int) -> Tensor:
        shape = self._shape
        size = (shape.num_layers, 2, shape.num_kv_heads, capacity, shape.head_dim)
        return torch.empty(size, dtype=self._dtype, device=self._device)


class Layers(Protocol):
    """The rows of each layer, by its number."""

    def __getitem__(self, layer: int, /) -> ContextRows:
        """One layer's rows, read-only."""
        ...


@dataclass(frozen=True, slots=True)
class ContextView:
    """A context at one ratio, as attention reads it: layers, and the position that follows.

    ``lead``: what every tail over it begins with, per layer [heads, rows, head_dim]; or nothing.
    With ``arrival``, a layer may be read only once that lets ``wait`` return for it.
    """

    layers: Layers
    num_tokens: int
    ratio: float
    arrival: LayerArrival | None = None
    lead: Sequence[DenseKV] = ()

    @property
    def num_lead(self) -> int:
        """Rows that a tail over it begins with."""
        return self.lead[0].tokens if self.lead else 0


@dataclass(frozen=True, slots=True)
class ResidentContext:
    """A compressed cache in memory, read-only, shared by every query on it.

    Shapes: counts [bands, layers, heads] int32, rows each band adds; ratios name the bands.
    ``num_tokens`` is the document's length with its prefix (N): the position where questions
    start, however few rows are kept. Buffers may have room for more bands than ``ratios`` names.
    ``arrival`` tells which layers are there, when they have not all come yet. ``generation``
    names the stored copy that it is; a tail belongs to the rows of one generation.
    ``remainders``, where it has some: per layer [bands, 2, heads, rows, head_dim], a few rows
    per band and head for what is evicted at its ratio.
    """

    layers: tuple[ContextRows, ...]
    counts: Tensor
    ratios: tuple[float, ...]
    num_tokens: int
    arrival: LayerArrival | None = None
    generation: str | None = None
    remainders: Sequence[Tensor] | None = None
    _views: dict[float, ContextView] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of K and V held in memory, with their scales."""
        remainders = sum(own.nbytes for own in self.remainders or ())
        return sum(layer.size_bytes for layer in self.layers) + remainders

    def highest_ratio(self, lowest: float, highest: float) -> float | None:
        """The highest of its ratios from ``lowest`` to ``highest``; None when there is none."""
        return max((r for r in self.ratios if lowest <= r <= highest), default=None)

    def extended(self, counts: Tensor, ratios: Sequence[float]) -> "ResidentContext":
        """The same buffers with more bands, once those are verified too. Shares the views."""
        return replace(self, counts=counts, ratios=tuple(ratios))

    def view(self, ratio: float) -> ContextView:
        """The context at one of its ratios: the same buffers, shorter runs; made once for each.

        Raises: ValueError, when ``ratio`` is not one of ``ratios``: rounding would make an answer
            depend on what others asked for.
        """
        band = self.ratios.index(ratio)
        if ratio not in self._views:
            lengths = self.counts[: band + 1].sum(dim=0, dtype=torch.int32)
            layers = tuple(
                rows.truncated(length.to(rows.start.device))
                for rows, length in zip(self.layers, lengths, strict=True)
            )
            self._views[ratio] = ContextView(
                layers, self.num_tokens, ratio, self.arrival, leads(self.remainders, band, ratio)
            )
        return self._views[ratio]


def leads(remainders: Sequence[Tensor] | None, band: int, ratio: float) -> tuple[DenseKV, ...]:
    """What comes first in a tail over the rows of a band, as views.

    Shapes: per layer [heads, rows, head_dim]. None of them where there are no remainders, or
    nothing was evicted.
    """
    if remainders is None or ratio == 1.0:
        return ()
    return tuple(DenseKV(own[band, 0], own[band, 1]) for own in remainders)
