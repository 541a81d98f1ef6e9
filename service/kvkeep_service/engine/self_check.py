"""Before a model is served: its answers through our attention must be those of its own.

A name on a list promises what the list's author looked at. This looks at the loaded model, in a
few forwards over a few tokens; what it does not see is a window longer than they are.
"""

from typing import Final

import torch
from torch import Tensor

from kvkeep_service.engine.build import BuiltCache, build
from kvkeep_service.engine.decode import Sequence, SequenceOptions, decode_step, prefill_question
from kvkeep_service.engine.model import LanguageModel, LoadedModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.start_errors import ModelUnsupported

_PREFIX_TOKENS, _DOCUMENT_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 4, 20, 5, 2
# Of the length of the logits: rounding stays below, and another scale or rope does not.
_TOLERANCES: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def check_attention(loaded: LoadedModel, reference: str) -> None:
    """Compare logits of a prefill, a question and a token with those of the stock model.

    Modifies: nothing that lasts; no other forward may run. Raises: ModelUnsupported.
    """
    model = _Listening(loaded.language_model)
    ids = _some_ids(model.vocabulary)
    document, question = ids[: _PREFIX_TOKENS + _DOCUMENT_TOKENS], ids[-_QUESTION_TOKENS:]
    built = _built(model, document)
    sequence = Sequence(
        model,
        built.context.view(1.0),
        question,
        SequenceOptions(max_tokens=_ANSWER_TOKENS),
        tokenizer=loaded.tokenizer,
        stop_ids=frozenset(),
    )
    prefill_question(model, sequence)
    decode_step(model, [sequence])
    ours = torch.cat(model.heard)
    stock = model.stock_logits([*ids, sequence.generated[0]])[-_ANSWER_TOKENS:]
    error = float((ours - stock).norm() / stock.norm())
    tolerance = _TOLERANCES[model.dtype]
    # Not "error > tolerance", which a NaN would pass.
    if not error <= tolerance:
        raise ModelUnsupported(
            reference,
            f"its answers differ by {error:.2g} of their size from those of its own attention;"
            f" {tolerance:.2g} is allowed in {model.dtype}",
        )


class _Listening(LanguageModel):
    """A model that remembers the logits it gave."""

    def __init__(self, inner: LanguageModel) -> None:
        super().__init__(inner.stock, inner.shape)
        self.heard: list[Tensor] = []

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        self.heard.append(found)
        return found


def _some_ids(vocabulary: int) -> list[int]:
    count = _PREFIX_TOKENS + _DOCUMENT_TOKENS + _QUESTION_TOKENS
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(vocabulary, (count,), generator=generator).tolist()
    return ids


def _built(model: LanguageModel, ids: list[int]) -> BuiltCache:
    protected = torch.zeros(len(ids) - _PREFIX_TOKENS, dtype=torch.bool)
    document = DocumentTokens(ids[:_PREFIX_TOKENS], ids[_PREFIX_TOKENS:], protected)
    steps = build(model, document, policy=None, ratios=(1.0,))
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            built: BuiltCache = finished.value
            return built
