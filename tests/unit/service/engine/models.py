"""Models for engine tests: tiny random ones of each architecture, and the bundled real one."""

import copy
from collections.abc import Generator
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from kvkeep_service.engine.architecture import check_supported, fixed_rope
from kvkeep_service.engine.attention import ATTENTION_NAME, register_attention
from kvkeep_service.engine.build import BuiltCache, ScoringPolicy, build
from kvkeep_service.engine.model import LanguageModel
from kvkeep_service.engine.prefill import DocumentTokens
from kvkeep_service.ports import Quantization

KINDS = (
    "llama",
    "llama3-rope",
    "mistral",
    "ministral",
    "qwen2",
    "qwen2-windows",
    "qwen3",
    "qwen3-moe",
    "phi3",
    "phi3-longrope",
    "smollm3",
    "gemma3",
    "yarn",
)
WINDOW = 48
VOCABULARY = 300
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.9 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama3-rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "ministral": (MinistralConfig, {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, {}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "phi3": (Phi3Config, {"sliding_window": 4096}),
    "phi3-longrope": (
        Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 24,
            "head_dim": 256,
            # Tied to embeddings that are scaled up, it would repeat its input.
            "tie_word_embeddings": False,
        },
    ),
    "yarn": (Qwen3Config, {"rope_parameters": YARN}),
}


def tiny_config(kind: str) -> Any:
    """A config of 3 layers, 6 query heads on 2 KV heads, head_dim 16 (256 of a gemma3)."""
    arguments: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        # The default of 0.02 makes a model that attends to everything alike.
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    make, changes = _CONFIGS[kind]
    return make(**arguments | copy.deepcopy(changes))


def stock_model(kind: str) -> PreTrainedModel:
    """The tiny model as transformers runs it; the same weights every time."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), attn_implementation="eager")
    return model.eval()


def engine_model(stock: PreTrainedModel) -> LanguageModel:
    """A stock model's weights behind our attention."""
    register_attention()
    config = copy.deepcopy(stock.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    model.load_state_dict(stock.state_dict())
    shape = check_supported("tiny", stock.config)
    fixed_rope(model, model.config)
    return LanguageModel(model.eval(), shape)


def random_document(tokens: int, *, prefix: int = 5, seed: int = 0) -> DocumentTokens:
    """Random token ids with nothing protected but the prefix."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (prefix + tokens,), generator=generator).tolist()
    return DocumentTokens(ids[:prefix], ids[prefix:], torch.zeros(tokens, dtype=torch.bool))


def drained(steps: Generator[object, None, Any]) -> Any:
    """What a generator returns, once all of its steps were taken."""
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            return finished.value


def run_build(
    model: LanguageModel,
    document: DocumentTokens,
    policy: ScoringPolicy | None,
    ratios: tuple[float, ...],
    quantization: Quantization = "none",
) -> BuiltCache:
    """Run a build to its end."""
    steps = build(model, document, policy=policy, ratios=ratios, quantization=quantization)
    built: BuiltCache = drained(steps)
    return built
