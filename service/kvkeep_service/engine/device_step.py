"""A decode step in two halves, where Triton serves: numbers from the host, then the device's work.

``prepare`` writes down whose token is next, where contexts and tails are and how long these have
become, and queues one copy of it. ``run`` is tensor operations on buffers of one shape, the same
ones whoever decodes: it asks the device nothing, so it can be captured in a graph.
"""

from collections.abc import Sequence as Several
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvkeep_kernels.layout import CodeKind
from kvkeep_kernels.step_tables import StepGroup, StepShape, StepTables, kind_of, tile_rows
from kvkeep_service.engine.cache import ContextView, Tail
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.passes import Reader, by_context
from kvkeep_service.engine.transfer import fill

# Token, position, tokens of its tail, and one number that keeps what follows aligned.
_NUMBERS_EACH = 4


class Decoding(Reader, Protocol):
    """A sequence whose next token is to be found."""

    generated: list[int]

    @property
    def position(self) -> int:
        """Position of the newest token, which is not in its tail yet."""
        ...


One = TypeVar("One", bound=Decoding)


class Part(NamedTuple):
    """Sequences over contexts of one form, those on one context in a row, and their shape."""

    shape: StepShape
    members: list[int]


def parts_of(model: LanguageModel, sequences: Several[Decoding]) -> list[Part]:
    """How a batch is cut: by the form of its contexts, each part as large as its bucket."""
    forms: dict[CodeKind | None, list[int]] = {}
    for index in by_context(sequences):
        kind = kind_of(sequences[index].context.layers[0])
        forms.setdefault(kind, []).append(index)
    shape = model.shape
    bounds = tuple(shape.bounds(layer) for layer in range(shape.num_layers))
    group_size = shape.num_q_heads // shape.num_kv_heads
    parts = []
    for kind, members in forms.items():
        sizes = [len(list(group)) for _, group in _groups([sequences[n] for n in members])]
        rows = tile_rows(sizes, group_size, shape.head_dim, model.dtype, kind)
        step = StepShape(
            bounds=bounds,
            sequences=1 << (len(members) - 1).bit_length(),
            num_kv_heads=shape.num_kv_heads,
            group_size=group_size,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            kind=kind,
            tile_rows=rows,
        )
        parts.append(Part(step, members))
    return parts


class DeviceStep:
    """Decode steps of one shape. Of the engine's thread."""

    def __init__(self, model: LanguageModel, shapes: Several[StepShape]) -> None:
        """``shapes`` of the parts that a batch is cut into. Allocates its input buffers."""
        self._model = model
        self._count = sum(shape.sequences for shape in shapes)
        sizes = [_NUMBERS_EACH * self._count, *(shape.numbers for shape in shapes)]
        self._inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=model.device)
        each, *buffers = self._inputs.split(sizes)
        self._each = each.view(_NUMBERS_EACH, self._count)
        self._tables = [StepTables(*both) for both in zip(shapes, buffers, strict=True)]
        self._described: list[tuple[ContextView, Tail, Tensor]] = []

    def prepare(self, parts: Several[Several[One]]) -> list[One | None]:
        """Queue the copy of what the next ``run`` reads. Returns whose row each row of it is.

        Tails have room for one row more. Where the same sequences decode in the same buffers as
        the last time, only their newest tokens are copied.
        """
        rows: list[One | None] = []
        for tables, members in zip(self._tables, parts, strict=True):
            rows += [*members, *[None] * (tables.shape.sequences - len(members))]
        numbers = [
            *(0 if one is None else one.generated[-1] for one in rows),
            *(0 if one is None else one.position for one in rows),
            # A row more than it has, for the token's own.
            *(1 if one is None else one.tail.length + 1 for one in rows),
            *(0 for _ in rows),
        ]
        present = [one for one in rows if one is not None]
        # The kernels write by address, and would write behind a buffer.
        has_room = (one.tail.length < one.tail.buffer.shape[3] for one in present)
        assert all(has_room), "every tail was to have room for one row more"
        described = [(one.context, one.tail, one.tail.buffer) for one in present]
        if not self._is_described(described):
            # Forgotten first: a batch that cannot be described must not pass for the last one.
            self._described = []
            for tables, members in zip(self._tables, parts, strict=True):
                groups = [
                    StepGroup(context.layers, tuple(one.tail.buffer for one in group))
                    for context, group in _groups(members)
                ]
                numbers += tables.describe(groups)
        fill(self._inputs[: len(numbers)], torch.tensor(numbers, dtype=torch.int64))
        self._described = described
        return rows

    def run(self) -> Tensor:
        """Logits [rows, vocabulary] fp32 of what was prepared; writes a row to every tail.

        Nothing but the contents of buffers differs from one call to the next.
        """
        first = 0
        for tables in self._tables:
            last = first + tables.shape.sequences
            tables.set_tail_tokens(self._each[2, first:last])
            first = last
        hidden = self._model.hidden(self._each[0, :, None], self._each[1, :, None], self)
        return self._model.logits(hidden[:, -1])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, one token each. Modifies the tails."""
        outs, first = [], 0
        for tables in self._tables:
            last = first + tables.shape.sequences
            tables.append(layer, k[first:last, :, 0], v[first:last, :, 0])
            outs.append(tables.attend(layer, q[first:last, :, 0], scale=scale))
            first = last
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[:, :, None]

    def forget(self) -> None:
        """Let go of contexts and tails; the next step describes its own anew."""
        self._described = []
        for tables in self._tables:
            tables.forget()

    def _is_described(self, wanted: list[tuple[ContextView, Tail, Tensor]]) -> bool:
        # They are held, so nothing else can have become what they are.
        return len(wanted) == len(self._described) and all(
            mine is theirs
            for known, one in zip(self._described, wanted, strict=True)
            for mine, theirs in zip(known, one, strict=True)
        )


def _groups(sequences: Several[One]) -> list[tuple[ContextView, list[One]]]:
    """Those on one context together, who follow one another."""
    groups = groupby(sequences, lambda one: id(one.context))
    found = [list(members) for _, members in groups]
    return [(members[0].context, members) for members in found]
