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
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvkeep_kernels.attention import dense_prefill
from kvkeep_kernels.scoring import PlusFactors, chunk_max_attention, row_lse
from kvkeep_service.engine.build import SLICE_TOKENS, DocumentTokens, Parameters
from kvkeep_service.engine.cache import FullCache, Tail
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.ports import Normalization, Scoring

POLICY_VERSION = 1
CHUNK_TOKENS: dict[Scoring, int] = {"exact": 2000, "local": 1024}
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
    watcher = None

    def __init__(
        self,
        prompts: RepeatPrompts,
        *,
        scoring: Scoring,
        chunk_tokens: int,
        normalization: Normalization = "none",
    ) -> None:
        self._prompts = prompts
        self._scoring: Scoring = scoring
        self._normalization: Normalization = normalization
        self.chunk_tokens = chunk_tokens

    @property
    def parameters(self) -> Parameters:
        """As ``ScoringPolicy.parameters``."""
        named: dict[str, str | int | float] = {
            "scoring": self._scoring,
            "chunk_tokens": self.chunk_tokens,
        }
        # Not named when it is "none": so are caches of versions that knew no other.
        if self._normalization != "none":
            named["normalization"] = self._normalization
        return named

    def score(
        self, model: LanguageModel, cache: FullCache, document: DocumentTokens
    ) -> Generator[float, None, Tensor]:
        """As ``ScoringPolicy.score``; one work item per slice of a repeat input."""
        shape, total = model.shape, len(document.ids)
        scores = torch.zeros(len(shape.evicting), shape.num_kv_heads, total, device=model.device)
        for chunk in _chunks(total, self.chunk_tokens):
            ids = self._prompts.repeat_input(document, chunk)
            norms = _PlusNorms(model) if self._normalization == "kvzip_plus" else None
            repeat = _RepeatPass(model, cache, document, chunk, self._scoring, norms, scores)
            for done in _forward_in_slices(model, ids, document.num_tokens, repeat):
                yield (chunk.start + len(chunk) * done) / total
        return scores


class _RepeatPass:
    """One repeat input over one chunk: its tail, and the running column maximum."""

    def __init__(
        self,
        model: LanguageModel,
        cache: FullCache,
        document: DocumentTokens,
        chunk: range,
        scoring: Scoring,
        norms: "_PlusNorms | None",
        scores: Tensor,
    ) -> None:
        self.norms = norms
        self._evicting = model.shape.evicting
        self._cache = cache
        self._num_prefix, self._num_tokens = document.num_prefix, document.num_tokens
        self._first = document.num_prefix + chunk.start
        self._last = document.num_prefix + chunk.stop
        self._is_exact = scoring == "exact"
        self._scores = scores[:, :, chunk.start : chunk.stop]
        self.tail = Tail(model.shape, dtype=model.dtype, device=model.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """As ``AttentionPass.attend``, batch 1. Modifies the tail and the scores."""
        own = self.tail.write(layer, k[0], v[0])
        window = self._cache.window(layer)
        if window is not None:
            # Nothing of it is evicted, so nothing is scored: it sees the document's end, as ever.
            before = self._cache.lasting(layer, self._num_tokens)
            return dense_prefill(q[0], own, visible=[before], scale=scale, window=window).out[None]
        prefix = self._cache.rows(layer, 0, self._num_prefix)
        chunk = self._cache.rows(layer, self._first, self._last)
        if self._is_exact:
            whole = self._cache.rows(layer, 0, self._num_tokens)
            attended = dense_prefill(q[0], own, visible=[whole], scale=scale)
            lse = row_lse(q[0], prefix.k, chunk.k, own.k, scale=scale)
        else:
            attended = dense_prefill(q[0], own, visible=[prefix, chunk], scale=scale)
            lse = attended.lse
        plus = None if self.norms is None else self.norms.factors(layer, chunk.v)
        best = chunk_max_attention(q[0], chunk.k, lse, scale=scale, plus=plus)
        scores = self._scores[self._evicting.index(layer)]
        torch.maximum(scores, best, out=scores)
        return attended.out[None]


class _PlusNorms:
    """What KVzip+ multiplies the weights of one chunk by, gathered while its pass runs."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._value_norms: dict[int, Tensor] = {}
        self._hidden_norm: Tensor | None = None

    def see(self, _: int, hidden: Tensor) -> None:
        """Take what the next layer's attention reads, [1, rows, hidden]. Modifies itself."""
        norm = torch.linalg.vector_norm(hidden[0], dim=-1, dtype=torch.float32)
        # A token whose embedding is zero, such as padding, would count infinitely: not at all.
        self._hidden_norm = norm.masked_fill(norm == 0.0, torch.inf)

    def factors(self, layer: int, values: Tensor) -> PlusFactors:
        """Those of the rows last seen and of a chunk's values [num_kv_heads, chunk, head_dim]."""
        assert self._hidden_norm is not None, "a forward that shows nothing of what it reads"
        if layer not in self._value_norms:
            projection = self._model.output_projection(layer)
            group_size = len(projection) // len(values)
            # One head at a time: the vectors themselves are hidden-sized, for every token.
            norms = [
                torch.linalg.vector_norm(values[head // group_size].float() @ own.float().T, dim=-1)
                for head, own in enumerate(projection)
            ]
            self._value_norms[layer] = torch.stack(norms)
        return PlusFactors(self._value_norms[layer], self._hidden_norm)


def _chunks(total: int, chunk_tokens: int) -> Iterator[range]:
    for first in range(0, total, chunk_tokens):
        yield range(first, min(first + chunk_tokens, total))


def _forward_in_slices(
    model: LanguageModel, ids: list[int], position: int, repeat: _RepeatPass
) -> Iterator[float]:
    """Run a repeat input from ``position`` on, yielding the fraction done after each slice."""
    tokens = torch.tensor([ids])
    repeat.tail.reserve(len(ids))
    for first in range(0, len(ids), SLICE_TOKENS):
        piece = tokens[:, first : first + SLICE_TOKENS]
        last = first + piece.shape[1]
        positions = torch.arange(position + first, position + last)[None]
        # Not across the yield: forwards of others come in between.
        with model.showing_inputs(repeat.norms.see) if repeat.norms else nullcontext():
            model.hidden(piece, positions, repeat)
        repeat.tail.extend(piece.shape[1])
        yield last / len(ids)
