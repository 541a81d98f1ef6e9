"""What a model may be called: a hub id, a directory, a GGUF file, or the packaged one."""

from pathlib import Path

from kvkeep_service.start_errors import ModelUnavailable

BUNDLED = "bundled"


def is_hub_id(reference: str) -> bool:
    """Whether a model is neither the packaged one nor in a file or directory of this machine."""
    return reference != BUNDLED and not Path(reference).expanduser().exists()


def check_model_reference(reference: str) -> None:
    """Refuse a model that is not where it is said to be, as far as a look at files can tell.

    Raises: ModelUnavailable.
    """
    path = Path(reference).expanduser()
    if reference == BUNDLED or (path.suffix == ".gguf" and path.is_file()):
        return
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(reference, f"the directory has no config.json{_gguf_in(path)}")
    elif path.suffix == ".gguf":
        raise ModelUnavailable(reference, "there is no such file")
    elif path.exists():
        reason = "it is a file; a model is a hub id, a directory or a .gguf file"
        raise ModelUnavailable(reference, reason)
    elif reference.startswith(("/", ".", "~")):
        raise ModelUnavailable(reference, "there is no such directory")


def _gguf_in(directory: Path) -> str:
    found = sorted(directory.glob("*.gguf"))
    if found:
        return f"; to take the GGUF file in it, name that: {found[0]}"
    return ", so no model is in it"
