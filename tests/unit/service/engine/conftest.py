"""The bundled model, converted once per machine and loaded once per test session."""

from typing import Any

import pytest

from kvkeep_service.config import Settings
from kvkeep_service.engine.model import LoadedModel, load_model


@pytest.fixture(scope="session")
def bundled() -> LoadedModel:
    return load_model(
        "bundled",
        device="cpu",
        dtype="float32",
        model_cache=Settings().model_cache,
        reserve_tokens=256,
    )


@pytest.fixture
def tokenizer(bundled: LoadedModel) -> Any:
    return bundled.tokenizer
