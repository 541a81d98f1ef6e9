"""Expected attention equals its formula over a stock model's own queries before rope, in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvkeep_service.engine.architecture import check_supported
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.policies import expected_attention
from kvkeep_service.policies.expected_attention import NUM_SINKS, ExpectedAttention

from ..engine.masked_reference import MaskedReference
from ..engine.models import KINDS, engine_model, random_document, stock_model
from .scored import scored

# Fewer than in earnest: the mean of whole matrices is slow.
FUTURE = 60


def query_before_rope(stock: Any, reference: MaskedReference, layer: int) -> Tensor:
    """What a layer asks with where rope turns nothing: [heads, tokens, head_dim] fp64."""
    read = reference.read[layer][None]
    still = torch.ones(1, read.shape[1], stock.config.head_dim)
    with reference._installed(), torch.inference_mode():
        stock.model.layers[layer].self_attn(
            hidden_states=read,
            position_embeddings=(still, torch.zeros_like(still)),
            attention_mask=None,
        )
    return reference.seen[layer][0].double()


def mean_rotation(stock: Any, layer: int, first: int) -> Tensor:
    """The mean of the rotation matrices of the positions to come, column by column."""
    config = stock.config
    if getattr(config, "no_rope_layers", [1] * 3)[layer] == 0:
        return torch.eye(config.head_dim, dtype=torch.float64)
    unit = torch.eye(config.head_dim)[:, None].expand(-1, FUTURE, -1)
    positions = torch.arange(first, first + FUTURE)[None]
    kind = [config.layer_types[layer]] if config.model_type == "gemma3_text" else []
    cos, sin = stock.model.rotary_emb(unit, positions, *kind)
    rotated, _ = apply_rotary_pos_emb(unit[None], unit[None], cos, sin)
    return rotated[0].double().mean(dim=1).T


def formula(kind: str, document: DocumentTokens) -> Tensor:
    """[evicting layers, kv heads, document tokens], for a prefix that holds all sinks."""
    stock = stock_model(kind)
    reference = MaskedReference(stock)
    reference.forward([*document.prefix_ids, *document.ids], 0)
    layers = []
    for layer in check_supported("tiny", stock.config).evicting:
        k, v, scale = reference.seen[layer][1], reference.values[layer], reference.scales[layer]
        sample = query_before_rope(stock, reference, layer)[:, NUM_SINKS:]
        turn = mean_rotation(stock, layer, document.num_tokens)
        keys = k[:, NUM_SINKS:].double()
        weights = []
        for head in range(len(sample)):
            mean = turn @ sample[head].mean(0)
            spread = turn @ torch.cov(sample[head].T, correction=0) @ turn.T
            own = keys[head // (len(sample) // len(k))]
            variance = torch.einsum("ni,ij,nj->n", own, spread, own)
            weights.append(torch.softmax(scale * own @ mean + scale**2 / 2 * variance, 0))
        norms = v[:, NUM_SINKS:].double().norm(dim=-1)
        scores = torch.stack(weights).unflatten(0, (len(k), -1)).mean(1) * norms
        layers.append(scores[:, document.num_prefix - NUM_SINKS :])
    return torch.stack(layers).float()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_the_formula(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_attention, "FUTURE_POSITIONS", FUTURE)
    document = random_document(120, prefix=6, seed=1)
    model = engine_model(stock_model(kind))
    ours = scored(model, document, ExpectedAttention(model))
    torch.testing.assert_close(ours, formula(kind, document), rtol=5e-3, atol=1e-6)


def test_scores_do_not_depend_on_how_the_prefill_is_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    document, model = random_document(150, seed=2), engine_model(stock_model("llama"))
    whole = scored(model, document, ExpectedAttention(model))
    # The first slice holds nothing but sinks.
    monkeypatch.setattr("kvkeep_service.engine.prefill.SLICE_TOKENS", NUM_SINKS)
    sliced = scored(model, document, ExpectedAttention(model))
    torch.testing.assert_close(sliced, whole, rtol=5e-3, atol=1e-6)


def test_sinks_that_a_short_prefix_leaves_to_the_document_are_kept_first() -> None:
    document, model = random_document(100, prefix=2), engine_model(stock_model("llama"))
    ours = scored(model, document, ExpectedAttention(model))
    sinks = NUM_SINKS - 2
    assert (ours[:, :, :sinks] == ours[:, :, sinks:].amax()).all()
