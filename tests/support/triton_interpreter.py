"""Triton's interpreter as tests need it: bf16 products, poisoned memory, mutated kernels.

Only for modules that ``triton_aot.run_interpreted`` runs.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture
def bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bf16, whose bits it takes for integers, and round to it."""
    builder = interpreter.InterpreterBuilder
    stock_dot: Callable[..., Any] = builder.create_dot
    stock_convert: Callable[..., Any] = interpreter._convert_float

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return stock_dot(self, widened(a), widened(b), *rest)

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
            return rounded.view(torch.uint16).numpy()
        return stock_convert(values, source, target, rounding)

    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(interpreter, "_convert_float", convert)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill whatever torch allocates uninitialised with NaN, integers with their largest value."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.isnan(torch.empty(8)).all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def mutated(module: ModuleType, found: str, planted: str, folder: Path) -> ModuleType:
    """A copy of a kernel module with one piece of its text replaced."""
    text = Path(module.__file__ or "").read_text()
    assert text.count(found) == 1, f"{found!r} stands {text.count(found)} times in {module}"
    path = folder / "mutant.py"
    path.write_text(text.replace(found, planted))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant
