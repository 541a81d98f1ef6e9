"""Calibrating writes what exact KVzip thinks of each head, where a server looks for it."""

import stat
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvkeep_service import app, cli, command_line
from kvkeep_service.calibrate import calibrate
from kvkeep_service.config import Settings
from kvkeep_service.engine.model import LoadedModel
from kvkeep_service.errors import InvalidRequest
from kvkeep_service.head_score_files import (
    head_scores_path,
    read_head_scores,
    write_head_scores,
)
from kvkeep_service.plan import Planner
from kvkeep_service.policies.head_scores import HeadScores, encode_head_scores
from kvkeep_service.ports import CompressionSpec
from kvkeep_service.start_errors import SettingsInvalid

from .policies.scored import scored
from .tiny import LONG, SHORT


def read(settings: Settings, loaded: LoadedModel) -> HeadScores | None:
    return read_head_scores(settings, loaded.info, loaded.language_model.shape)


def test_a_head_scores_what_its_best_row_scores_in_any_text(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    fractions: list[float] = []
    content = calibrate(tiny, [SHORT.text, LONG.text], fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    settings = Settings(data=tmp_path)
    write_head_scores(head_scores_path(settings, tiny.info), content)
    found = read(settings, tiny)
    assert found is not None
    best = []
    for document in (SHORT, LONG):
        plan = Planner(tiny).plan("acme", document, CompressionSpec(scoring="exact"))
        assert plan.policy is not None
        best.append(scored(tiny.language_model, plan.document, plan.policy).amax(dim=2))
    torch.testing.assert_close(torch.tensor(found.scores), torch.maximum(*best))


def test_a_text_too_short_to_score_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="text 2"):
        calibrate(tiny, [SHORT.text, "A short text."], lambda _: None)


def test_a_model_that_was_not_calibrated_has_no_scores(tiny: LoadedModel, tmp_path: Path) -> None:
    assert read(Settings(data=tmp_path), tiny) is None


def test_a_file_that_is_named_must_be_there_and_of_this_model(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    settings = Settings(data=tmp_path, head_scores=tmp_path / "heads.json")
    with pytest.raises(SettingsInvalid, match=r"heads\.json.*no such file"):
        read(settings, tiny)
    heads = ((0.5, 0.25), (0.125, 0.75))
    path = head_scores_path(settings, tiny.info)
    write_head_scores(path, encode_head_scores(heads, weights_digest="sha256:other", tokens=9))
    with pytest.raises(SettingsInvalid, match="sha256:other"):
        read(settings, tiny)
    own = encode_head_scores(heads, weights_digest=tiny.info.weights_digest, tokens=9)
    write_head_scores(path, own)
    found = read(settings, tiny)
    assert found is not None
    assert found.scores == heads


def test_where_nothing_can_be_written_is_told_in_a_sentence(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    settings = Settings(data=tmp_path / "file")
    with pytest.raises(SettingsInvalid, match="cannot be written"):
        write_head_scores(head_scores_path(settings, tiny.info), b"{}")


def test_the_command_says_where_it_wrote(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "set_up_logging", lambda: None)
    monkeypatch.setattr(app, "load_configured_model", lambda _: tiny)
    text = tmp_path / "typical.txt"
    text.write_text(SHORT.text, encoding="utf-8")
    data = tmp_path / "data"
    done = CliRunner().invoke(cli.app, ("calibrate", str(text), "--data", str(data)))
    assert done.exit_code == 0
    assert done.stdout == f"{head_scores_path(Settings(data=data), tiny.info)}\n"
    assert read(Settings(data=data), tiny) is not None
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert "100%" in done.stderr


@pytest.mark.parametrize("content", [None, b"\xff", b"A short text."])
def test_the_command_refuses_what_it_cannot_measure(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr(command_line, "set_up_logging", lambda: None)
    monkeypatch.setattr(app, "load_configured_model", lambda _: tiny)
    text = tmp_path / "typical.txt"
    if content is not None:
        text.write_bytes(content)
    done = CliRunner().invoke(cli.app, ("calibrate", str(text), "--data", str(tmp_path / "data")))
    assert done.exit_code == 2
    assert done.stderr.startswith("kvkeep-server: ")
    assert not (tmp_path / "data").exists()
