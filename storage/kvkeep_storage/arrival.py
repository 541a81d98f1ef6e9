"""A cache while it arrives: the buffers of the whole, and who is told what is valid in them."""

from dataclasses import dataclass
from typing import Protocol

from kvkeep_storage.artifact import (
    CacheDtype,
    CacheRows,
    Int32Array,
    LayerRows,
    Quantization,
)
from kvkeep_storage.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class ArrivingRows:
    """The buffers of a cache that is being read, with the capacity of every band asked for.

    The same fields and layout as ``CacheRows``, and the same buffers as the ``CacheRows`` that
    the load ends in. What was not announced to the observer is undefined: never look at it.
    Lower ratios are prefixes of each head's run, so a layer that was announced for the first
    bands is valid in that prefix while the rest is still written.
    """

    dtype: CacheDtype
    num_kv_heads: int
    head_dim: int
    ratios: tuple[float, ...]
    counts: Int32Array
    protected: Int32Array
    layers: tuple[LayerRows, ...]
    quantization: Quantization

    def whole(self) -> CacheRows:
        """The same buffers as rows, once all of them are verified. Raises: Invalid."""
        return CacheRows(
            self.dtype,
            self.num_kv_heads,
            self.head_dim,
            self.ratios,
            self.counts,
            self.protected,
            self.layers,
            self.quantization,
        )


class LoadObserver(Protocol):
    """Told how far a load is; called on the event loop, so nothing here may take long.

    "The first bands" are those up to ``first_ratio``, or all that are loaded without one. What
    was announced stays valid whatever happens later to the load.
    """

    def on_room(self, rows: ArrivingRows, manifest: Manifest, generation: str) -> None:
        """These are the buffers of this load; called once, right before the first layer."""
        ...

    def on_layer(self, index: int) -> None:
        """Everything of this layer in the first bands is verified; layers come in order."""
        ...

    def on_first(self) -> None:
        """Every layer of the first bands is verified."""
        ...


class Announcer:
    """Tells an observer in order what was verified in any order."""

    def __init__(self, observer: LoadObserver | None) -> None:
        """``observer`` may be None: then nobody is told anything."""
        self._observer = observer
        self._told = False
        self._generation = ""
        self._missing: list[int] = []
        self._next = 0

    @property
    def has_told(self) -> bool:
        """Whether the observer has got buffers: they cannot be exchanged from then on."""
        return self._told

    def expect(self, generation: str, num_layers: int, bands: int) -> None:
        """Begin with new buffers: ``bands`` parts of each layer come first."""
        self._generation = generation
        self._missing = [bands] * num_layers
        self._next = 0

    def verified(self, layer: int, rows: ArrivingRows, manifest: Manifest) -> None:
        """One more part of a layer in the first bands is verified."""
        self._missing[layer] -= 1
        if self._observer is None:
            return
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            if not self._told:
                self._told = True
                self._observer.on_room(rows, manifest, self._generation)
            self._observer.on_layer(self._next)
            self._next += 1
        if self._next == len(self._missing):
            self._observer.on_first()
