"""Tails of the queries that decode together, side by side, so that a layer reads them in one call.

The tails stay their queries' own: this is a copy of them that grows with them, row by row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep_kernels.padded_tails import PaddedTails
from kvkeep_service.engine.architecture import ModelShape
from kvkeep_service.engine.cache import Tail

_STEP_TOKENS = 64
"""Room grows by so many rows at once, so that growing is rare."""
_PADDING_MAX = 4
"""A batch whose padded rows are more than so many times its own is not worth it."""
_SPARE = 1.25
"""Who leaves and is followed by another one soon shall not make the copy shrink and grow."""


def place_rows(rows: int) -> int:
    """Rows of a batch that a tail answers for, which may grow to so many of its own.

    The copy has never more rows, in all its places, than those who are in it answer for: who
    reserves memory for a tail reserves so much for its place as well.
    """
    return int(_SPARE * _rounded(rows))


def is_worthwhile(tails: Sequence[Tail], rows_max: int) -> bool:
    """Whether tails are many, on a CPU, about as long as each other, and fit ``rows_max``."""
    lengths = [tail.length for tail in tails]
    is_even = len(lengths) * max(lengths) <= _PADDING_MAX * sum(lengths)
    is_allowed = len(lengths) * _rounded(max(lengths) + 1) <= rows_max
    is_cpu = all(tail.device.type == "cpu" for tail in tails)
    return len(lengths) > 1 and is_even and is_allowed and is_cpu


class TailBatch:
    """One buffer for the tails of a batch, kept from step to step. Of the engine's thread.

    Each step: ``arrange``, then ``write`` in every layer, then ``extend``; a step that fails
    before ``extend`` leaves the tails as they were.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype) -> None:
        """Holds nothing yet."""
        self._shape = shape
        self._dtype = dtype
        self._tails: list[Tail] = []
        self._num_copied: list[int] = []
        self._kv = self._zeros(0, 0)
        self._lengths: list[int] = []
        self._places = self._ends = torch.zeros(0, dtype=torch.int64)
        self._mask = torch.zeros(0)

    @property
    def size_bytes(self) -> int:
        """What this copy has of memory."""
        return self._kv.nbytes

    def arrange(self, tails: Sequence[Tail], rows_max: int) -> list[int]:
        """Take in the tails of the next step, one new row each to come.

        Returns their indices in the order in which they lie here: who left gave its place to the
        last one. ``rows_max``: rows that this copy may have in all, for which ``is_worthwhile``
        has said yes. Modifies: this copy only.
        """
        wanted = {id(tail) for tail in tails}
        for place in reversed(range(len(self._tails))):
            if id(self._tails[place]) not in wanted:
                self._remove(place)
        known = {id(tail) for tail in self._tails}
        for tail in tails:
            if id(tail) not in known:
                self._tails.append(tail)
                self._num_copied.append(0)
        self._fit(rows_max)
        for place, tail in enumerate(self._tails):
            first, last = self._num_copied[place], tail.length
            if first < last:
                self._kv[:, :, place, :, first:last] = tail.rows(first)
                self._num_copied[place] = last
        self._lengths = [tail.length for tail in self._tails]
        self._places = torch.arange(len(self._tails))
        self._ends = torch.tensor(self._lengths)
        visible = torch.arange(max(self._lengths) + 1) <= self._ends[:, None]
        mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, -torch.inf)
        self._mask = mask[:, None, None]
        index = {id(tail): number for number, tail in enumerate(tails)}
        return [index[id(tail)] for tail in self._tails]

    def write(self, layer: int, k: Tensor, v: Tensor) -> PaddedTails:
        """Store a new row of every tail and return all of them with it.

        Shapes: k, v [sequences, num_kv_heads, head_dim], in the order of ``arrange``.
        """
        kv = self._kv[layer]
        kv[0, self._places, :, self._ends] = k
        kv[1, self._places, :, self._ends] = v
        count, tokens = len(self._tails), self._mask.shape[3]
        return PaddedTails(kv[0, :count, :, :tokens], kv[1, :count, :, :tokens], self._mask)

    def extend(self) -> None:
        """Hand the rows that every layer has now written to the tails. Modifies the tails."""
        for place, (tail, first) in enumerate(zip(self._tails, self._lengths, strict=True)):
            tail.append(self._kv[:, :, place, :, first : first + 1])
            self._num_copied[place] = first + 1

    def clear(self) -> None:
        """Give the buffer back; whoever decodes next is copied anew."""
        self._tails.clear()
        self._num_copied.clear()
        self._kv = self._zeros(0, 0)

    def _remove(self, place: int) -> None:
        last = len(self._tails) - 1
        rows = self._num_copied[last]
        if place != last:
            self._kv[:, :, place, :, :rows] = self._kv[:, :, last, :, :rows]
            self._clear_rows(place, rows, self._num_copied[place])
            self._tails[place], self._num_copied[place] = self._tails[last], rows
        self._clear_rows(last, 0, rows)
        self._tails.pop()
        self._num_copied.pop()

    def _clear_rows(self, place: int, first: int, copied: int) -> None:
        """Whoever comes after a tail masks its rows, which may hold what is not finite."""
        # A step that failed may have written one row more.
        self._kv[:, :, place, :, first : copied + 1] = 0

    def _fit(self, rows_max: int) -> None:
        count = len(self._tails)
        tokens = _rounded(max(tail.length for tail in self._tails) + 1)
        places, room = self._kv.shape[2], self._kv.shape[4]
        if count <= places and tokens <= room and places * room <= rows_max:
            return
        if max(places, count) * max(room, tokens) <= rows_max:
            count, tokens = max(places, count), max(room, tokens)
        # Two buffers at once would be twice as much, and the tails have every row.
        self._kv = self._zeros(0, 0)
        self._num_copied = [0] * len(self._tails)
        self._kv = self._zeros(count, tokens)

    def _zeros(self, places: int, tokens: int) -> Tensor:
        # What is masked counts nothing only when it is finite.
        shape = self._shape
        size = (shape.num_layers, 2, places, shape.num_kv_heads, tokens, shape.head_dim)
        return torch.zeros(size, dtype=self._dtype)


def _rounded(tokens: int) -> int:
    return -(-tokens // _STEP_TOKENS) * _STEP_TOKENS
