"""KVzip: keep the KV pairs that the model needs to repeat the document.

For each chunk of the document the model is asked to repeat it, with the chunk given as the
answer (teacher-forced), so all rows are scored in parallel. A pair's score is the highest
attention any repeat row pays to it, over prefix + this chunk + the repeat input itself.

Source: arXiv 2505.23416, section 3 and algorithm 1. ``local`` is ours: the repeat forward
attends to exactly the keys the score is defined over, instead of the whole cache, so its cost
per chunk does not grow with the document. KVzip+ weighs attention by what it adds to the hidden
state, ``|W_O v| / |h|``: W_O of the query head, h what the row's attention reads, as in kvpress.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.attention import attend_also, dense_prefill
from kvkeep_kernels.layout import DenseKV
from kvkeep_kernels.remainder import CLUSTERS
from kvkeep_kernels.scoring import PlusFactors, chunk_max_attention
from kvkeep_service.engine.build import Parameters
from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens, slices
from kvkeep_service.engine.remainders import REMAINDER_VERSION, QuerySample
from kvkeep_service.ports import Normalization, Scoring

POLICY_VERSION = 1
CHUNK_TOKENS: dict[Scoring, int] = {"exact": 2000, "local": 544}
"""As published; and what is one slice of a forward together with its prompt. Larger ones cost more,
and give no better answers (docs/quality.md)."""
SPARE_POSITIONS = 64
MIN_CHUNK_TOKENS = 64
_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with "
_LEAD_TOKENS = 8


class TextEncoder(Protocol):
    """What the prompts need of a chat template."""

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a plain text."""
        ...

    def turn_end_ids(self) -> list[int]:
        """Token ids of the end of the user's turn and the assistant's header."""
        ...


@dataclass(frozen=True, slots=True)
class RepeatPrompts:
    """The fixed token ids of a repeat input."""

    first: tuple[int, ...]
    later: tuple[int, ...]
    turn_end: tuple[int, ...]

    @classmethod
    def from_template(cls, template: TextEncoder) -> "RepeatPrompts":
        """Tokenise the prompts with the model's own template."""
        return cls(
            tuple(template.text_ids(_FIRST)),
            tuple(template.text_ids(_LATER)),
            tuple(template.turn_end_ids()),
        )

    def repeat_input(self, document: DocumentTokens, chunk: range) -> list[int]:
        """Prompt and teacher-forced answer for one chunk of document tokens."""
        ids = document.ids
        answer = list(ids[chunk.start : chunk.stop])
        if chunk.start == 0:
            return [*self.first, *self.turn_end, *answer]
        lead = ids[max(0, chunk.start - _LEAD_TOKENS) : chunk.start]
        return [*self.later, *lead, *self.turn_end, *answer]


def chunk_tokens(scoring: Scoring, num_tokens: int, max_positions: int) -> int:
    """Tokens per chunk: the mode's own, shrunk where few positions are left after N.

    Every repeat input starts at position N, so ``N + chunk + 64`` must fit.
    """
    left = max_positions - num_tokens - SPARE_POSITIONS
    return max(MIN_CHUNK_TOKENS, min(CHUNK_TOKENS[scoring], left))


class KVzip:
    """The policy. ``scoring`` is "exact" (as published) or "local" (linear time)."""

    name = "kvzip"
    version = POLICY_VERSION
    repeats = True
    watcher = None

    def __init__(
        self,
        prompts: RepeatPrompts,
        *,
        scoring: Scoring,
        chunk_tokens: int,
        neighbours: int = 0,
        normalization: Normalization = "none",
        remainder: bool = False,
    ) -> None:
        """``neighbours``: chunks that local scoring's forward sees on each side of its own.

        ``remainder``: whether a few rows of each head stand for those that are evicted.
        """
        self._prompts = prompts
        self._scoring: Scoring = scoring
        self._neighbours = neighbours
        self._normalization: Normalization = normalization
        self._has_remainder = remainder
        self.chunk_tokens = chunk_tokens
        self.sample: QuerySample | None = None

    @property
    def parameters(self) -> Parameters:
        """As ``ScoringPolicy.parameters``."""
        named: dict[str, str | int | float] = {
            "scoring": self._scoring,
            "chunk_tokens": self.chunk_tokens,
        }
        # Not named when they are none: so are caches of versions that knew no other.
        if self._neighbours:
            named["neighbours"] = self._neighbours
        if self._normalization != "none":
            named["normalization"] = self._normalization
        if self._has_remainder:
            named["remainder"] = CLUSTERS
            named["remainder_version"] = REMAINDER_VERSION
        return named

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """As ``ScoringPolicy.score``; one work item per slice of a repeat input and layer."""
        shape, total = model.shape, len(document.ids)
        scores = torch.zeros(len(shape.evicting), shape.num_kv_heads, total, device=model.device)
        if self._has_remainder:
            self.sample = QuerySample(-(-total // self.chunk_tokens), shape.num_layers)
        for chunk in _chunks(total, self.chunk_tokens):
            for done in self._repeat(model, cache, document, chunk, scores):
                yield (chunk.start + len(chunk) * done) / total
        return scores

    def _repeat(
        self,
        model: LanguageModel,
        cache: FullCache,
        document: DocumentTokens,
        chunk: range,
        scores: Tensor,
    ) -> Generator[float, None, None]:
        """Repeat one chunk, layer by layer, so that only one layer's rows of it are ever there."""
        ids = torch.tensor([self._prompts.repeat_input(document, chunk)])
        pieces, first = slices(ids.shape[1]), document.num_tokens
        forwards = [
            model.begin(
                ids[:, piece.start : piece.stop],
                torch.arange(first + piece.start, first + piece.stop)[None],
            )
            for piece in pieces
        ]
        reach = None if self._scoring == "exact" else self._neighbours * self.chunk_tokens
        repeat = _RepeatPass(
            model, cache, document, chunk, reach, ids.shape[1], scores, self.sample
        )
        sampled = self._sampled(chunk, ids.shape[1])
        num_layers = model.shape.num_layers
        for layer in range(num_layers):
            repeat.enter(layer)
            if self._normalization == "kvzip_plus" and layer in model.shape.evicting:
                repeat.value_norm = _value_norm(model, cache, layer, repeat.columns)
            for piece, forward in zip(pieces, forwards, strict=True):
                if self._normalization == "kvzip_plus":
                    repeat.hidden_norm = _hidden_norm(forward.read_by(layer))
                repeat.sampled = [row - piece.start for row in sampled if row in piece]
                if layer < num_layers - 1:
                    forward.run_layer(layer, repeat)
                else:
                    forward.attend_only(layer, repeat)
                yield (layer + piece.stop / ids.shape[1]) / num_layers

    def _sampled(self, chunk: range, num_rows: int) -> list[int]:
        """The rows of a repeat input whose queries are kept."""
        if self.sample is None:
            return []
        return self.sample.rows_of(
            chunk.start // self.chunk_tokens, num_rows - len(chunk), num_rows
        )


class _RepeatPass:
    """One repeat input over one chunk: the rows of the present layer, and the running maximum.

    Prefix, chunk and the repeat input's own rows, which scores are defined over, lie one behind
    the other: so a forward attends to all of them at once.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: FullCache,
        document: DocumentTokens,
        chunk: range,
        reach: int | None,
        num_rows: int,
        scores: Tensor,
        sample: QuerySample | None,
    ) -> None:
        """``reach``: document tokens attended to on each side of the chunk; None for all.

        ``sample`` takes the queries of the rows that are ``sampled``, if any.
        """
        shape, num_prefix = model.shape, document.num_prefix
        self.columns = range(num_prefix + chunk.start, num_prefix + chunk.stop)
        """The chunk's tokens in the cache."""
        self.value_norm: Tensor | None = None
        self.hidden_norm: Tensor | None = None
        self.sampled: list[int] = []
        self._sample = sample
        self._cache, self._num_prefix = cache, num_prefix
        first, last = num_prefix, document.num_tokens
        if reach is not None:
            first = max(first, self.columns.start - reach)
            last = min(last, self.columns.stop + reach)
        self._others = (range(first, self.columns.start), range(self.columns.stop, last))
        self._evicting, self._num_tokens = shape.evicting, document.num_tokens
        self._scores = scores[:, :, chunk.start : chunk.stop]
        windows = [window - 1 for window in shape.windows if window is not None]
        room = num_rows + max(num_prefix + len(chunk), *windows, 0)
        size = (2, shape.num_kv_heads, room, shape.head_dim)
        self._rows = torch.empty(size, dtype=model.dtype, device=model.device)
        self._end = 0

    def enter(self, layer: int) -> None:
        """Make ready for the first slice of a layer. Modifies its rows."""
        self._end = 0
        if self._cache.window(layer) is not None:
            # Nothing of it is evicted, so nothing is scored: it sees the document's end, as ever.
            pieces = [self._cache.lasting(layer, self._num_tokens)]
        else:
            pieces = self._pieces(layer, range(self._num_prefix), self.columns)
        for rows in pieces:
            self._append(rows.k, rows.v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, batch 1. Modifies its rows and the scores."""
        self._append(k[0], v[0])
        if self._sample is not None and self.sampled:
            self._sample.take(layer, q[0], self.sampled, scale)
        own = DenseKV(self._rows[0, :, : self._end], self._rows[1, :, : self._end])
        window = self._cache.window(layer)
        attended = dense_prefill(q[0], own, scale=scale, window=window)
        if window is not None:
            return attended.out[None]
        chunk_k = own.k[:, self._num_prefix : self._num_prefix + len(self.columns)]
        best = chunk_max_attention(q[0], chunk_k, attended.lse, scale=scale, plus=self._plus())
        scores = self._scores[self._evicting.index(layer)]
        torch.maximum(scores, best, out=scores)
        others = self._pieces(layer, *self._others)
        return attend_also(q[0], attended, others, scale=scale).out[None]

    def _pieces(self, layer: int, *pieces: range) -> list[DenseKV]:
        return [self._cache.rows(layer, piece.start, piece.stop) for piece in pieces]

    def _append(self, k: Tensor, v: Tensor) -> None:
        end = self._end + k.shape[1]
        self._rows[0, :, self._end : end] = k
        self._rows[1, :, self._end : end] = v
        self._end = end

    def _plus(self) -> PlusFactors | None:
        if self.value_norm is None or self.hidden_norm is None:
            return None
        return PlusFactors(self.value_norm, self.hidden_norm)


def _hidden_norm(hidden: Tensor) -> Tensor:
    """Norms of what a layer's attention reads, [1, rows, hidden]: [rows] fp32."""
    norm: Tensor = torch.linalg.vector_norm(hidden[0], dim=-1, dtype=torch.float32)
    # A token whose embedding is zero, such as padding, would count infinitely: not at all.
    return norm.masked_fill(norm == 0.0, torch.inf)


def _value_norm(model: LanguageModel, cache: FullCache, layer: int, columns: range) -> Tensor:
    """Norms of what some tokens' values become in the output: [num_q_heads, columns] fp32."""
    values = cache.rows(layer, columns.start, columns.stop).v
    projection = model.output_projection(layer)
    group_size = len(projection) // len(values)
    # One head at a time: the vectors themselves are hidden-sized, for every token.
    norms = [
        torch.linalg.vector_norm(values[head // group_size].float() @ own.float().T, dim=-1)
        for head, own in enumerate(projection)
    ]
    return torch.stack(norms)


def _chunks(total: int, chunk_tokens: int) -> Iterator[range]:
    for first in range(0, total, chunk_tokens):
        yield range(first, min(first + chunk_tokens, total))
