"""What is refused before a model is looked for, and what a hub out of reach says."""

import logging
import socket
from pathlib import Path

import pytest

from kvkeep_service.engine.gguf import converted_directory, quiet_loading
from kvkeep_service.engine.model import load_model
from kvkeep_service.start_errors import SettingsInvalid


def test_a_device_that_is_not_there_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket, "create_connection", no_network)
    with pytest.raises(SettingsInvalid, match="KVKEEP_DEVICE = 'cuda:99': torch finds "):
        load_model(
            "nobody/has-this-model",
            device="cuda:99",
            dtype="auto",
            model_cache=tmp_path / "cache",
            reserve_tokens=256,
        )
    assert not (tmp_path / "cache").exists()


def test_a_model_cache_that_cannot_be_made_is_refused_by_the_name_of_its_setting(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SettingsInvalid, match=f"KVKEEP_MODEL_CACHE = '{tmp_path}/file': cannot be"):
        converted_directory(tmp_path / "model.gguf", tmp_path / "file")


def test_every_try_to_reach_a_hub_is_kept_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    hub = logging.getLogger("huggingface_hub.utils._http")
    level = logging.getLogger("huggingface_hub").level
    with quiet_loading():
        hub.warning("Retrying in 1s [Retry 1/5].")
    assert caplog.text == ""
    assert logging.getLogger("huggingface_hub").level == level
