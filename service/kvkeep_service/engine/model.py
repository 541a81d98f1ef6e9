"""One language model, loaded: what it is, its template, and its two forwards."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from kvkeep_kernels.backend import backend_report
from kvkeep_kernels.layout import KernelUnavailable
from kvkeep_service.engine.architecture import (
    ModelShape,
    check_model_type,
    check_supported,
    fixed_rope,
    has_rope_by_kind,
)
from kvkeep_service.engine.attention import (
    ATTENTION_NAME,
    AttentionPass,
    register_attention,
)
from kvkeep_service.engine.forward import LayeredForward
from kvkeep_service.engine.gguf import (
    bundled_gguf,
    converted_directory,
    quiet_loading,
)
from kvkeep_service.engine.one_row import multiply_single_rows_as_vectors
from kvkeep_service.engine.rotation import Rotation
from kvkeep_service.engine.template import ChatTemplate
from kvkeep_service.model_reference import BUNDLED, check_model_reference
from kvkeep_service.ports import KernelsInfo, ModelInfo
from kvkeep_service.start_errors import ModelUnavailable, SettingsInvalid

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LanguageModel:
    """A transformers model behind our attention. Forwards belong to one thread at a time."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape) -> None:
        """Take a model loaded with ``attn_implementation="kvkeep"``."""
        self._model = model
        self.shape = shape
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: AttentionPass) -> Tensor:
        """Last hidden states of new tokens; the pass decides what they attend to.

        Shapes: token_ids, positions [batch, tokens] int64. Returns [batch, tokens, hidden].
        Modifies: whatever KV the pass owns.
        """
        # The decoder's own forward asks the device whether positions have gaps, and waits.
        forward = LayeredForward(
            self._model.model, token_ids.to(self.device), positions.to(self.device)
        )
        for layer in range(self.shape.num_layers):
            forward.run_layer(layer, attention)
        return forward.finish()

    def begin(self, token_ids: Tensor, positions: Tensor) -> LayeredForward:
        """A forward of new tokens that is taken from layer to layer by whoever asks for it.

        Shapes: as ``hidden``. Modifies: nothing yet.
        """
        return LayeredForward(
            self._model.model, token_ids.to(self.device), positions.to(self.device)
        )

    def rotation(self, layer: int, first: int, last: int) -> Rotation:
        """The rope of a layer at positions ``first`` to ``last`` (exclusive)."""
        decoder, config = self._model.model, self._model.config
        positions = torch.arange(first, last, device=self.device)[None]
        # The embedding takes dtype and device from this, and nothing else.
        like = torch.empty(0, device=self.device)
        if not getattr(decoder.layers[layer].self_attn, "use_rope", True):
            return Rotation.none(last - first, self.shape.head_dim, self.device)
        if has_rope_by_kind(config):
            cos, sin = decoder.rotary_emb(like, positions, config.layer_types[layer])
        else:
            cos, sin = decoder.rotary_emb(like, positions)
        return Rotation(cos[0], sin[0])

    def output_projection(self, layer: int) -> Tensor:
        """What takes each query head's output to hidden states: [num_q_heads, hidden, head_dim]."""
        weight: Tensor = self._model.model.layers[layer].self_attn.o_proj.weight
        heads: Tensor = weight.unflatten(1, (self.shape.num_q_heads, self.shape.head_dim))
        return heads.transpose(0, 1)

    @property
    def stock(self) -> PreTrainedModel:
        """The model as transformers made it, with our attention."""
        return self._model

    @property
    def vocabulary(self) -> int:
        """How many token ids it knows."""
        size: int = self._model.config.vocab_size
        return size

    def stock_logits(self, token_ids: Sequence[int]) -> Tensor:
        """What transformers' own attention makes of a text: [tokens, vocabulary] fp32.

        No other forward may run meanwhile.
        """
        self._model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                ids = torch.tensor([list(token_ids)], device=self.device)
                out = self._model(input_ids=ids, use_cache=False)
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        logits: Tensor = out.logits[0]
        return logits.float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of some rows only: [rows, hidden] -> [rows, vocabulary] fp32."""
        with torch.inference_mode():
            out: Tensor = self._model.lm_head(hidden)
        return out.float()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything the engine needs of one model."""

    language_model: LanguageModel
    template: ChatTemplate
    tokenizer: Any
    stop_ids: frozenset[int]
    rope: str
    info: ModelInfo


def load_model(
    reference: str,
    *,
    device: str,
    dtype: str,
    model_cache: Path,
    reserve_tokens: int,
    chat_template: str | None = None,
) -> LoadedModel:
    """Load a hub id, a directory, a GGUF file, or ``bundled``.

    ``device`` and ``dtype`` may be "auto". ``reserve_tokens`` are kept for questions.
    Raises: SettingsInvalid, for a device or kernels that are not there; ModelUnavailable;
        ModelUnsupported.
    """
    # What needs no model comes first.
    where = _resolve_device(device)
    kernels = _kernels(where)
    directory, digest = _resolve(reference, model_cache)
    # Before the configuration is read: some architectures are not known to transformers.
    described, _ = _from_hub(reference, PretrainedConfig.get_config_dict, directory)
    check_model_type(reference, str(described.get("model_type", "none")))
    config = _from_hub(reference, AutoConfig.from_pretrained, directory)
    shape = check_supported(reference, config)
    kind = _resolve_dtype(dtype, where, config)
    register_attention()
    model = _from_hub(
        reference,
        AutoModelForCausalLM.from_pretrained,
        directory,
        dtype=kind,
        attn_implementation=ATTENTION_NAME,
    )
    tokenizer = _from_hub(reference, AutoTokenizer.from_pretrained, directory)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    model.to(where).eval()
    rope = fixed_rope(model, config)
    if where.type == "cpu" and kind is torch.bfloat16:
        multiply_single_rows_as_vectors(model)
    template = ChatTemplate(tokenizer, model=reference)
    info = ModelInfo(
        name=reference if reference == BUNDLED else Path(reference).name or reference,
        architecture=config.model_type,
        device=str(where),
        dtype=str(kind).removeprefix("torch."),
        num_layers=shape.num_layers,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_positions=shape.max_positions,
        max_document_tokens=shape.max_positions - reserve_tokens,
        weights_digest=digest or _weights_digest(reference, config, directory),
        kernels=kernels,
    )
    return LoadedModel(
        LanguageModel(model, shape),
        template,
        tokenizer,
        _stop_ids(model, tokenizer),
        rope,
        info,
    )


def _resolve(reference: str, model_cache: Path) -> tuple[str, str | None]:
    """What transformers is to load, and the digest when the reference has one of its own."""
    if reference == BUNDLED:
        directory, digest = converted_directory(bundled_gguf(), model_cache)
        return str(directory), f"gguf:{digest}"
    check_model_reference(reference)
    path = Path(reference).expanduser()
    if path.suffix == ".gguf":
        directory, digest = converted_directory(path, model_cache)
        return str(directory), f"gguf:{digest}"
    return (str(path) if path.is_dir() else reference), None


def _from_hub(reference: str, load: Any, directory: str, **arguments: Any) -> Any:
    try:
        with quiet_loading():
            return load(directory, **arguments)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(reference, str(error).partition("\n")[0]) from error


def _weights_digest(reference: str, config: Any, directory: str) -> str:
    """Hub revision (its blobs are immutable), or sha256 over a directory's weight files."""
    revision = getattr(config, "_commit_hash", None)
    if revision:
        return f"revision:{revision}"
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ModelUnavailable(reference, "no safetensors weights in the directory")
    sha = hashlib.sha256()
    for path in [*files, Path(directory) / "config.json"]:
        with path.open("rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{sha.hexdigest()}"


def _kernels(device: torch.device) -> KernelsInfo:
    """Choose and test the kernels now: the first answer compiles, and waits for the device."""
    try:
        report = backend_report(device)
    except KernelUnavailable as error:
        raise SettingsInvalid([str(error)]) from error
    return KernelsInfo(report.backend, report.reason, report.is_healthy)


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device(device)
    if where.type == "cuda" and (where.index or 0) >= (found := torch.cuda.device_count()):
        problem = f"KVKEEP_DEVICE = {device!r}: torch finds {found} CUDA devices on this machine"
        raise SettingsInvalid([problem])
    return where


def _resolve_dtype(dtype: str, device: torch.device, config: Any) -> torch.dtype:
    """ "auto" is float32 on a CPU, where answers are promised equal in any batch."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    stored = getattr(config, "dtype", None)
    return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16


def _stop_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for ids in (
        model.generation_config.eos_token_id,
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)
