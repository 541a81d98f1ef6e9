"""The bundled model, converted once per machine and loaded once per test session."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvkeep_service.config import Settings
from kvkeep_service.engine.build import BuiltCache
from kvkeep_service.engine.model import LanguageModel, LoadedModel, load_model
from kvkeep_service.engine.scheduler import Scheduler

from .gated import PATIENCE_SECONDS, RATIOS, GatedModel, policy
from .models import engine_model, random_document, run_build, stock_model


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


@pytest.fixture(scope="session")
def plain() -> LanguageModel:
    return engine_model(stock_model("llama"))


@pytest.fixture(scope="session")
def contexts(plain: LanguageModel) -> list[BuiltCache]:
    """Three documents' caches, each readable at three ratios."""
    return [
        run_build(plain, random_document(tokens, seed=tokens), policy(), RATIOS)
        for tokens in (260, 400, 610)
    ]


@pytest.fixture
def model(plain: LanguageModel) -> GatedModel:
    return GatedModel(plain)


@pytest.fixture
def scheduler(model: GatedModel) -> Iterator[Scheduler]:
    """A started engine, with the gate open and nothing in it."""
    started = Scheduler(model, max_waiting=100)
    started.start()
    yield started
    model.release()
    assert started.stop(PATIENCE_SECONDS)
