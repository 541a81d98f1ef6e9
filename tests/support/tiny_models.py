"""Random models of two layers, saved as directories that the server loads like any other.

They read text with the bundled model's tokenizer and chat template, so that documents and
questions are tokenised as in earnest. Their answers mean nothing, and differ with every token of
document and question: weights are drawn wide enough for attention to be anything but uniform.
"""

import shutil
import warnings
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvkeep_service.config import Settings
from kvkeep_service.engine.gguf import bundled_gguf, converted_directory

TinyKind = Literal["llama", "qwen2", "qwen3", "mistral", "gemma3"]
MAX_POSITIONS = 8192
GEMMA3_WINDOW = 64
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_VOCABULARY = 49152
_SEED = 20260401


def model_cache() -> Path:
    """Where converted models lie: as for a server with this environment."""
    return Settings().model_cache


def bundled_directory() -> Path:
    """The bundled model as a directory; converted at the first call on a machine."""
    with warnings.catch_warnings():
        # What transformers says about GGUF files is nothing that a test could be wrong about.
        warnings.simplefilter("ignore")
        return converted_directory(bundled_gguf(), model_cache())[0]


def save_tiny_model(kind: TinyKind, directory: Path) -> Path:
    """Write the model of this kind, always the same one, and return its directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(_config(kind))
        for name, parameter in model.named_parameters():
            # Norms at one and biases at zero would hide a norm or a bias that is left out.
            if name.endswith("bias") or "norm" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(bundled_directory() / name, directory / name)
    return directory


def _config(kind: TinyKind) -> PretrainedConfig:
    shape = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    match kind:
        case "llama":
            return LlamaConfig(**shape)
        case "qwen2":
            return Qwen2Config(**shape)
        case "qwen3":
            return Qwen3Config(**shape, head_dim=16)
        case "mistral":
            return MistralConfig(**shape, sliding_window=None)
        case "gemma3":
            return Gemma3TextConfig(
                **shape,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=GEMMA3_WINDOW,
                layer_types=["sliding_attention", "full_attention"],
            )
