"""The tiny model of these tests, loaded as the server loads one, and variants of it."""

from dataclasses import replace
from pathlib import Path

from kvkeep_service.engine.model import LanguageModel, LoadedModel, load_model
from kvkeep_service.plan import Planner
from kvkeep_service.ports import CompressionSpec, DocumentSpec

from ...support.documents import contract
from ...support.tiny_models import model_cache, save_tiny_model
from .engine.gated import GatedModel

RESERVE_TOKENS = 256
# About 280 and 560 tokens: enough to evict from.
SHORT = DocumentSpec(contract("Lease", 10))
LONG = DocumentSpec(contract("Carriage by sea", 20))
AT_THIRD = CompressionSpec(ratio=0.3)


def load_tiny(directory: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(
        str(save_tiny_model("llama", directory)),
        device="cpu",
        dtype=dtype,
        model_cache=model_cache(),
        reserve_tokens=RESERVE_TOKENS,
    )


def with_positions(loaded: LoadedModel, max_positions: int) -> LoadedModel:
    """The same model, said to have fewer positions."""
    inner = loaded.language_model
    return replace(
        loaded,
        language_model=LanguageModel(
            inner._model, replace(inner.shape, max_positions=max_positions)
        ),
        info=replace(
            loaded.info,
            max_positions=max_positions,
            max_document_tokens=max_positions - RESERVE_TOKENS,
        ),
    )


def gated(loaded: LoadedModel) -> tuple[LoadedModel, GatedModel]:
    """The same model behind a gate of its own."""
    model = GatedModel(loaded.language_model)
    return replace(loaded, language_model=model), model


def document_tokens(loaded: LoadedModel, document: DocumentSpec) -> int:
    """N of a document: with its prefix."""
    return Planner(loaded).plan("acme", document, AT_THIRD).document.num_tokens
