"""One server for all tests that neither stop it nor damage what it stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.server import EAGER_SWEEPS, Server
from ..support.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("shared") / "data"
    # One thread: a model this small only loses by sharing its work out. A sweeper runs
    # all the time, and must not touch anything that is in use.
    with Server(data, model=tiny_model, threads=1, **EAGER_SWEEPS) as running:
        yield running
