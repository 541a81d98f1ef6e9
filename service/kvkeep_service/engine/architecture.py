"""Which models are served, by name, and the numbers of one that caches depend on.

A model whose attention this engine would compute wrongly is refused at start, never served:
another architecture, rope whose frequencies move with the length of the text, or a model of
which no layer sees the whole document. ``docs/models.md`` is the list for users.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvkeep_kernels.layout import UNBOUNDED, LogitBounds
from kvkeep_service.start_errors import ModelUnsupported

SUPPORTED_MODEL_TYPES: Final = (
    "gemma3_text",
    "llama",
    "ministral",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
SUPPORTED_ROPE_TYPES: Final = ("default", "linear", "llama3", "longrope", "yarn")
# transformers slides every layer of these as soon as their configuration names a window.
_ALL_OR_NONE_SLIDE: Final = ("mistral", "phi3", "qwen3_moe")
_PINNED_ROPE: Final = "longrope with its long factors"
_KINDS: Final[Mapping[str, str]] = {
    "bamba": "layers with recurrent state",
    "falcon_h1": "layers with recurrent state",
    "falcon_mamba": "layers with recurrent state",
    "gemma2": "soft-capped attention",
    "gemma3": "a multimodal wrapper; its text model alone, gemma3_text, is supported",
    "gpt_oss": "attention sinks",
    "granitemoehybrid": "layers with recurrent state",
    "jamba": "layers with recurrent state",
    "mamba": "layers with recurrent state",
    "mamba2": "layers with recurrent state",
    "nemotron_h": "layers with recurrent state",
    "qwen3_next": "layers with recurrent state",
    "recurrent_gemma": "layers with recurrent state",
    "rwkv": "layers with recurrent state",
    "zamba2": "layers with recurrent state",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that caches depend on.

    ``windows``: of each layer how many tokens a token sees, itself included; None where it sees
    all before it. Empty: no layer has a window.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        """How many tokens a token of a layer sees, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    def bounds(self, layer: int) -> LogitBounds:
        """The same, as kernels take it."""
        window = self.window(layer)
        return UNBOUNDED if window is None else LogitBounds(window=window)

    @property
    def evicting(self) -> tuple[int, ...]:
        """The layers whose rows compete for a place; the others keep what their window sees."""
        return tuple(layer for layer in range(self.num_layers) if self.window(layer) is None)

    def full_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of the uncompressed KV cache of ``tokens`` tokens; of a window what it sees."""
        windows = (self.window(layer) for layer in range(self.num_layers))
        rows = sum(tokens if size is None else min(tokens, size - 1) for size in windows)
        return 2 * rows * self.num_kv_heads * self.head_dim * dtype.itemsize


def check_supported(reference: str, config: Any) -> ModelShape:
    """Refuse, by name, every architecture that would be served wrongly.

    Raises: ModelUnsupported.
    """
    check_model_type(reference, config.model_type)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise ModelUnsupported(reference, f"logits with a soft cap ({name})")
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelUnsupported(reference, "attention in both directions")
    for rope in _rope_types(config):
        if rope not in SUPPORTED_ROPE_TYPES:
            raise ModelUnsupported(
                reference, f"rope type {rope!r}; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
    windows = _windows(reference, config)
    if None not in windows:
        raise ModelUnsupported(
            reference,
            f"every layer has sliding-window attention (of {max(map(str, windows))} tokens):"
            " none would see a document whole",
        )
    head_dim = getattr(config, "head_dim", None)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        max_positions=config.max_position_embeddings,
        windows=windows if any(windows) else (),
    )


def check_model_type(reference: str, model_type: str) -> None:
    """Raises: ModelUnsupported, naming the architecture and those that are supported."""
    if model_type in SUPPORTED_MODEL_TYPES:
        return
    kind = f" ({_KINDS[model_type]})" if model_type in _KINDS else ""
    names = ", ".join(SUPPORTED_MODEL_TYPES)
    raise ModelUnsupported(reference, f"architecture {model_type!r}{kind}; supported: {names}")


def fixed_rope(model: PreTrainedModel, config: Any) -> str:
    """Make rotary frequencies the same at every length; describe them for the fingerprint.

    Only ``longrope`` has two sets of them. A model with more positions than it was first trained
    for gets the long ones always: what is cached of a short text must be right beside a long
    question, and a document read in slices must not change its rope half-way.
    Modifies: the model's rotary embedding.
    """
    rope: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if rope and "longrope" in _rope_types(config):
        before = rope["original_max_position_embeddings"]
        if config.max_position_embeddings > before:
            rotary = model.model.rotary_emb
            compute = ROPE_INIT_FUNCTIONS["longrope"]
            frequencies, _ = compute(config, rotary.inv_freq.device, seq_len=before + 1)
            rotary.inv_freq.copy_(frequencies)
            # transformers chooses anew at every forward only for a type that it knows.
            rotary.rope_type = _PINNED_ROPE
            return json.dumps(rope | {"pinned": _PINNED_ROPE}, sort_keys=True)
    return json.dumps(rope, sort_keys=True)


def has_rope_by_kind(config: Any) -> bool:
    """Whether layers that slide have a rope of their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(part, dict) for part in rope.values())


def _rope_types(config: Any) -> Iterator[str]:
    """Of all layers, or of each kind of layer where these differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in rope.values() if has_rope_by_kind(config) else [rope]:
        yield part.get("rope_type", "default")


def _windows(reference: str, config: Any) -> tuple[int | None, ...]:
    """The window of each layer. One that no position reaches the end of is none."""
    num_layers: int = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if window is not None and window >= config.max_position_embeddings:
        window = None
    if config.model_type in _ALL_OR_NONE_SLIDE:
        return (window,) * num_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(kinds) - known.keys())
    if unknown or (config.model_type == "llama" and "sliding_attention" in kinds):
        name = (unknown or ["sliding_attention"])[0]
        raise ModelUnsupported(reference, f"layers of type {name!r} in a {config.model_type}")
    return tuple(known[kind] for kind in kinds)
