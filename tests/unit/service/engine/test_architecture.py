"""What is served and what is refused, by name; rope that never moves; a last look at the model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig

from kvkeep_service.engine.architecture import (
    SUPPORTED_MODEL_TYPES,
    ModelShape,
    check_supported,
    fixed_rope,
)
from kvkeep_service.engine.model import LanguageModel, LoadedModel, load_model
from kvkeep_service.engine.self_check import check_attention
from kvkeep_service.start_errors import ModelUnsupported

from .gated import WORDS
from .models import KINDS, LONGROPE, engine_model, stock_model, tiny_config

REFUSED = {
    "mamba": "recurrent state",
    "jamba": "recurrent state",
    "qwen3_next": "recurrent state",
    "gpt_oss": "attention sinks",
    "gemma2": "soft-capped",
    "gemma3": "multimodal wrapper",
    "llava": "",
    "t5": "",
    "gpt2": "",
    "mixtral": "",
    "deepseek_v3": "",
}


@pytest.mark.parametrize("name", REFUSED)
def test_field_16_other_architectures_are_refused_by_name_before_weights_are_read(
    tmp_path: Path, name: str
) -> None:
    assert name in AutoConfig.for_model(name).model_type
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ModelUnsupported) as refused:
        load(tmp_path)
    assert f"architecture {name!r}" in str(refused.value)
    assert REFUSED[name] in str(refused.value)
    assert ", ".join(SUPPORTED_MODEL_TYPES) in str(refused.value)


def test_an_architecture_that_nobody_has_heard_of_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "yet_to_come"}))
    with pytest.raises(ModelUnsupported, match="architecture 'yet_to_come'; supported: "):
        load(tmp_path)


def load(directory: Path) -> LoadedModel:
    return load_model(
        str(directory),
        device="cpu",
        dtype="auto",
        model_cache=directory / "cache",
        reserve_tokens=256,
    )


@pytest.mark.parametrize("kind", ["mistral", "phi3"])
def test_a_model_of_which_every_layer_slides_is_refused(kind: str) -> None:
    config = tiny_config(kind)
    config.sliding_window = 1024
    with pytest.raises(ModelUnsupported, match="every layer has sliding-window attention"):
        check_supported("some/model", config)
    # As MistralConfig is without a word about it.
    with pytest.raises(ModelUnsupported, match="4096 tokens"):
        check_supported("some/model", MistralConfig())


def test_a_window_that_no_position_reaches_the_end_of_is_none() -> None:
    config = tiny_config("phi3")
    assert config.sliding_window == config.max_position_embeddings
    assert check_supported("some/phi", config).windows == ()


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
            "rope type 'dynamic'",
        ),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "soft cap (attn_logit_softcapping)"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "soft cap (final_logit_softcapping)"),
        ("gemma3", {"use_bidirectional_attention": True}, "both directions"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "type 'chunked_attention'"),
        ("llama", {"layer_types": ["sliding_attention"] * 3}, "type 'sliding_attention'"),
    ],
)
def test_what_a_supported_architecture_may_not_have_is_refused_by_name(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    config = tiny_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelUnsupported) as refused:
        check_supported("some/model", config)
    assert reason in str(refused.value)


def test_of_a_layer_with_a_window_only_what_that_sees_counts_in_the_full_size() -> None:
    shape = ModelShape(3, 4, 2, 8, 512, windows=(16, None, 16))
    assert shape.evicting == (1,)
    assert [shape.bounds(layer).window for layer in range(3)] == [16, None, 16]
    row_bytes = 2 * 2 * 8 * 4
    assert shape.full_bytes(100, torch.float32) == (100 + 15 + 15) * row_bytes
    assert shape.full_bytes(9, torch.float32) == (9 + 9 + 9) * row_bytes
    everywhere = replace(shape, windows=())
    assert everywhere.evicting == (0, 1, 2)
    assert everywhere.full_bytes(100, torch.bfloat16) == 300 * row_bytes // 2


@pytest.mark.parametrize("kind", ["phi3-longrope", "yarn", "llama3-rope", "gemma3"])
def test_keys_do_not_depend_on_how_far_a_document_has_been_read(kind: str) -> None:
    model = engine_model(stock_model(kind))._model
    hidden = torch.zeros(1, 1, 96)

    def angles(last: int) -> torch.Tensor:
        positions = torch.tensor([[5, last]])
        arguments = ["full_attention"] if kind == "gemma3" else []
        cos, _ = model.model.rotary_emb(hidden, positions, *arguments)
        return cos[0, 0]

    assert torch.equal(angles(8), angles(4000))


def test_longrope_has_its_long_factors_from_the_first_token_on_and_says_so() -> None:
    stock = stock_model("phi3-longrope")
    rotary = stock.model.rotary_emb
    rotary(torch.zeros(1, 1, 96), torch.tensor([[LONGROPE["original_max_position_embeddings"]]]))
    long = rotary.inv_freq.clone()
    rotary(torch.zeros(1, 1, 96), torch.tensor([[1]]))
    assert not torch.equal(rotary.inv_freq, long)
    described = json.loads(fixed_rope(stock, stock.config))
    rotary(torch.zeros(1, 1, 96), torch.tensor([[1]]))
    assert torch.equal(rotary.inv_freq, long)
    assert described["pinned"] == "longrope with its long factors"
    assert described["long_factor"] == LONGROPE["long_factor"]


def test_longrope_that_is_never_long_is_left_alone() -> None:
    stock = stock_model("phi3-longrope")
    before = stock.model.rotary_emb.inv_freq.clone()
    stock.config.max_position_embeddings = 64
    assert "pinned" not in json.loads(fixed_rope(stock, stock.config))
    assert torch.equal(stock.model.rotary_emb.inv_freq, before)


def checked(model: LanguageModel) -> None:
    check_attention(LoadedModel(model, None, WORDS, frozenset(), "", None), "tiny")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_served_passes_the_check_at_start(kind: str) -> None:
    model = engine_model(stock_model(kind))
    checked(model)
    # Still ours: the stock attention was only borrowed.
    assert model.stock.config._attn_implementation == "kvkeep"


def test_field_16_a_model_that_is_taken_for_another_fails_the_check_at_start() -> None:
    config = tiny_config("ministral")
    config.sliding_window = 8
    torch.manual_seed(3)
    stock = AutoModelForCausalLM.from_config(config).eval()
    model = engine_model(stock)
    checked(model)
    blind = LanguageModel(model.stock, replace(model.shape, windows=()))
    with pytest.raises(ModelUnsupported, match="its answers differ by"):
        checked(blind)
