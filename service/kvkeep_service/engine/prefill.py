"""Reading a document into a full cache, slice by slice and layer by layer."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.attention import dense_prefill
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel

SLICE_TOKENS = 576
"""Most tokens that go through a layer at a time.

A work item is one slice in one layer, which bounds how long a running answer waits for a build;
shorter slices keep several threads less busy. A chunk of 1,024 and what asks to repeat it are two.
"""


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


class PrefillWatcher(Protocol):
    """What a policy keeps of the queries of the prefill, to need no pass of its own."""

    def see_queries(self, layer: int, first: int, q: Tensor, scale: float) -> None:
        """Take one slice's rotated queries in one layer, in the order of positions.

        Shapes: q [num_q_heads, tokens, head_dim], of the tokens from ``first`` on; ``scale`` is
            what the layer multiplies logits by. Layers that do not evict are not shown. Modifies
            the watcher only.
        """
        ...


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
