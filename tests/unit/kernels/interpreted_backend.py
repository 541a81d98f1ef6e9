"""The self-test passes where kernels are right and fails where one is not; in the interpreter."""

import pytest
import torch

from kvkeep_kernels._triton import append, decode
from kvkeep_kernels.backend import backend_report
from kvkeep_kernels.self_test import PROBES, WrongResult, run_probes

from ...support.triton_interpreter import poisoned_memory

CPU = torch.device("cpu")


def test_every_probe_passes_and_triton_serves() -> None:
    report = backend_report(CPU)
    assert report.failures == ()
    assert (report.backend, report.reason) == ("triton", "the Triton self-test passed")


class Idle:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *_, **__: None


def test_a_kernel_that_writes_nothing_fails_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "merge_items", Idle())
    # Unpoisoned, the output may lie where a right one lay before.
    with poisoned_memory():
        failures = run_probes(CPU)
    assert [failure.operation for failure in failures] == [
        "ragged_decode",
        "decode_step",
        "quantized_rows",
    ]


def test_a_row_that_is_not_appended_fails_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "append_rows", Idle())
    with pytest.raises(WrongResult):
        PROBES["decode_step"](CPU)
