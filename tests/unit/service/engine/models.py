"""Models for engine tests: tiny random ones of each architecture, and the bundled real one."""

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvkeep_service.engine.attention import ATTENTION_NAME, register_attention
from kvkeep_service.engine.build import BuiltCache, DocumentTokens, ScoringPolicy, build
from kvkeep_service.engine.model import LanguageModel, check_supported
from kvkeep_service.ports import Quantization

KINDS = ("llama", "qwen2", "qwen3", "mistral")
VOCABULARY = 300
_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
}


def tiny_config(kind: str) -> Any:
    """A config of 3 layers, 6 query heads on 2 KV heads, head_dim 16."""
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
    if kind == "mistral":
        arguments["sliding_window"] = None
    return _CONFIGS[kind](**arguments)


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
    return LanguageModel(model.eval(), check_supported("tiny", stock.config))


def random_document(tokens: int, *, prefix: int = 5, seed: int = 0) -> DocumentTokens:
    """Random token ids with nothing protected but the prefix."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (prefix + tokens,), generator=generator).tolist()
    return DocumentTokens(ids[:prefix], ids[prefix:], torch.zeros(tokens, dtype=torch.bool))


def run_build(
    model: LanguageModel,
    document: DocumentTokens,
    policy: ScoringPolicy | None,
    ratios: tuple[float, ...],
    quantization: Quantization = "none",
) -> BuiltCache:
    """Run a build to its end."""
    steps = build(model, document, policy=policy, ratios=ratios, quantization=quantization)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            built: BuiltCache = finished.value
            return built
