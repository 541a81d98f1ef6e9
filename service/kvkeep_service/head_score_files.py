"""Where head scores of a model are: a file that the settings name, or one in the data directory."""

from hashlib import sha256
from pathlib import Path

from kvkeep_service.config import Settings
from kvkeep_service.engine.architecture import ModelShape
from kvkeep_service.policies.head_scores import HeadScores, HeadScoresInvalid
from kvkeep_service.ports import ModelInfo
from kvkeep_service.start_errors import SettingsInvalid
from kvkeep_storage.durable import replace

_FOLDER = "head-scores"


def head_scores_path(settings: Settings, model: ModelInfo) -> Path:
    """The file of this model; in the data directory each model has its own."""
    if settings.head_scores is not None:
        return settings.head_scores
    name = sha256(model.weights_digest.encode()).hexdigest()[:16]
    return settings.data / _FOLDER / f"{name}.json"


def read_head_scores(settings: Settings, model: ModelInfo, shape: ModelShape) -> HeadScores | None:
    """The scores to serve with; None when the model was not calibrated.

    Raises: SettingsInvalid, for a file that was named and is not there, that cannot be read, or
        that is of another model.
    """
    path = head_scores_path(settings, model)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if settings.head_scores is None:
            return None
        raise _refused(path, "there is no such file") from error
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    try:
        return HeadScores.parse(
            content,
            weights_digest=model.weights_digest,
            num_layers=len(shape.evicting),
            num_heads=shape.num_kv_heads,
        )
    except HeadScoresInvalid as error:
        raise _refused(path, f"no head scores of {model.name}: {error}") from error


def write_head_scores(path: Path, content: bytes) -> None:
    """Write a file durably, over an older one. Raises: SettingsInvalid, when it cannot be."""
    try:
        # The upper one may be the data directory, which is its user's alone.
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(path, content, root=path.parent)
    except OSError as error:
        raise _refused(path, f"cannot be written: {error.strerror}") from error


def _refused(path: Path, reason: str) -> SettingsInvalid:
    return SettingsInvalid([f"KVKEEP_HEAD_SCORES = {str(path)!r}: {reason}"])
