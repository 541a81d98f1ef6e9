"""Files that settings name, looked at before anything is loaded that takes time."""

from pathlib import Path

from kvkeep_service.config import Settings
from kvkeep_service.model_reference import check_model_reference
from kvkeep_service.start_errors import SettingsInvalid


def check_named_files(settings: Settings) -> None:
    """Refuse what cannot be read. Raises: SettingsInvalid; ModelUnavailable."""
    if settings.chat_template is not None:
        read_chat_template(settings.chat_template)
    if settings.head_scores is not None:
        try:
            settings.head_scores.open("rb").close()
        except OSError as error:
            problem = f"KVKEEP_HEAD_SCORES = {str(settings.head_scores)!r}: {error.strerror}"
            raise SettingsInvalid([problem]) from error
    check_model_reference(settings.model)


def read_chat_template(path: Path) -> str:
    """The template to use instead of the model's own. Raises: SettingsInvalid."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"KVKEEP_CHAT_TEMPLATE = {str(path)!r}: cannot be read: {error}"
        raise SettingsInvalid([problem]) from error
