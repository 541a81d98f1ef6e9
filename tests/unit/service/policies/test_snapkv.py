"""SnapKV's votes equal those of a stock model's whole attention matrix, in fp64."""

import pytest
import torch
from torch import Tensor

from kvkeep_service.engine.architecture import check_supported
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.policies.snapkv import POOLED_TOKENS, WINDOW_TOKENS, SnapKV

from ..engine.masked_reference import MaskedReference
from ..engine.models import KINDS, engine_model, random_document, stock_model
from .scored import scored


def votes(kind: str, document: DocumentTokens) -> Tensor:
    """[evicting layers, kv heads, document tokens before the window] fp64."""
    stock = stock_model(kind)
    reference = MaskedReference(stock)
    reference.forward([*document.prefix_ids, *document.ids], 0)
    total, half = document.num_tokens, POOLED_TOKENS // 2
    before = total - WINDOW_TOKENS
    layers = []
    for layer in check_supported("tiny", stock.config).evicting:
        q, k = reference.seen[layer]
        group_size = len(q) // len(k)
        logits = q.double() @ k.double().repeat_interleave(group_size, 0).transpose(1, 2)
        logits *= reference.scales[layer]
        logits.masked_fill_(torch.ones(total, total, dtype=torch.bool).triu(1), -torch.inf)
        voted = torch.softmax(logits, -1)[:, -WINDOW_TOKENS:, :before].mean(1)
        pooled = torch.stack(
            [voted[:, max(0, at - half) : at + half + 1].amax(1) for at in range(before)], 1
        )
        layers.append(pooled.unflatten(0, (len(k), -1)).mean(1)[:, document.num_prefix :])
    return torch.stack(layers)


@pytest.mark.parametrize("kind", KINDS)
def test_votes_equal_a_dense_stock_model(kind: str) -> None:
    document = random_document(150, prefix=4, seed=1)
    ours = scored(engine_model(stock_model(kind)), document, SnapKV())
    expected = votes(kind, document).float()
    torch.testing.assert_close(ours[:, :, :-WINDOW_TOKENS], expected, rtol=2e-3, atol=1e-6)


def test_the_window_is_kept_before_all_others_newest_first() -> None:
    ours = scored(engine_model(stock_model("llama")), random_document(150), SnapKV())
    window = ours[:, :, -WINDOW_TOKENS:]
    assert (window.diff(dim=-1) > 0).all()
    assert window.min() > 1 >= ours[:, :, :-WINDOW_TOKENS].max()


def test_the_window_may_span_slices_of_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    document, model = random_document(150, seed=2), engine_model(stock_model("llama"))
    whole = scored(model, document, SnapKV())
    monkeypatch.setattr("kvkeep_service.engine.prefill.SLICE_TOKENS", 7)
    torch.testing.assert_close(scored(model, document, SnapKV()), whole, rtol=2e-3, atol=1e-6)
