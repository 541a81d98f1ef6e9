"""A forward taken from layer to layer is the model's own forward."""

import pytest
import torch
from torch import Tensor

from kvkeep_service.engine.cache import FullCache
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import PrefillPass

from .models import KINDS, engine_model, random_document, stock_model

TOKENS = 70
EVERY_LAYER = 1000


class Seeing:
    """A pass that notes every query, key and value behind another pass."""

    def __init__(self, cache: FullCache) -> None:
        self.seen: list[Tensor] = []
        # A pass that is to compute every layer, the last one too.
        self._inner = PrefillPass(cache, 0, EVERY_LAYER)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = self._inner.attend(layer, q, k, v, scale)
        self.seen += [q.clone(), k.clone(), v.clone(), out]
        return out


def inputs(model: LanguageModel) -> tuple[Tensor, Tensor, Seeing]:
    document = random_document(TOKENS, prefix=0)
    cache = FullCache(model.shape, TOKENS, dtype=model.dtype, device=model.device)
    return torch.tensor([document.ids]), torch.arange(TOKENS)[None], Seeing(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer_equals_the_models_own_forward_bit_for_bit(kind: str) -> None:
    model = engine_model(stock_model(kind))
    ids, positions, whole = inputs(model)
    with torch.inference_mode():
        own = model.stock.model(ids, position_ids=positions, use_cache=False, kvkeep_pass=whole)
    ids, positions, stepped = inputs(model)
    hidden = model.hidden(ids, positions, stepped)
    assert len(stepped.seen) == 4 * model.shape.num_layers
    assert all(map(torch.equal, stepped.seen, whole.seen))
    assert torch.equal(hidden, own.last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_attends_to_the_same_without_the_rest_of_it(kind: str) -> None:
    model = engine_model(stock_model(kind))
    seen = []
    for is_whole in (True, False):
        ids, positions, attention = inputs(model)
        forward = model.begin(ids, positions)
        forward.run_layer(0, attention)
        step = forward.run_layer if is_whole else forward.attend_only
        step(1, attention)
        seen.append(attention.seen)
    assert all(map(torch.equal, *seen))


def test_forwards_of_others_between_two_layers_change_nothing() -> None:
    model = engine_model(stock_model("llama"))
    ids, positions, alone = inputs(model)
    model.hidden(ids, positions, alone)
    forward = model.begin(ids, positions)
    _, _, disturbed = inputs(model)
    for layer in range(model.shape.num_layers):
        forward.run_layer(layer, disturbed)
        _, _, other = inputs(model)
        model.hidden(ids.flip(1), positions, other)
    assert all(map(torch.equal, disturbed.seen, alone.seen))
