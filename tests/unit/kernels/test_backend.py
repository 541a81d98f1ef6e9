"""The choice of kernels: by device, by override, and never against a failed self-test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvkeep_kernels import backend, self_test, stock_flash
from kvkeep_kernels.backend import OVERRIDE_VARIABLE, backend_report, uses_triton
from kvkeep_kernels.layout import KernelUnavailable
from kvkeep_kernels.self_test import ProbeFailure

from ...support.triton_aot import run_interpreted

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(OVERRIDE_VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend_report.cache_clear()
    yield
    backend_report.cache_clear()


def break_probe(_: torch.device) -> None:
    raise RuntimeError("out of resources")


def test_a_cpu_is_served_by_torch_and_says_why() -> None:
    report = backend_report(CPU)
    assert (report.backend, report.is_healthy) == ("torch", True)
    assert report.reason == "Triton needs a GPU, not cpu"
    assert not uses_triton(CPU)


def test_a_gpu_that_passes_is_served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "run_probes", lambda _: ())
    monkeypatch.setattr(stock_flash, "failure", lambda _: None)
    assert uses_triton(GPU)
    report = backend_report(GPU)
    assert (report.device, report.is_healthy) == ("cuda:0", True)


def test_a_gpu_whose_dense_attention_fails_keeps_triton_and_shows_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "run_probes", lambda _: ())
    monkeypatch.setattr(stock_flash, "failure", lambda _: "no such kernel")
    report = backend_report(GPU)
    assert (report.backend, report.is_healthy) == ("triton", False)
    assert report.failures == (ProbeFailure("dense_prefill", "no such kernel"),)
    assert report.reason.endswith("dense attention makes whole logits: no such kernel")


@pytest.mark.parametrize("asked", ["", "triton"])
def test_a_gpu_that_fails_is_served_by_torch_and_shows_the_failure(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, asked)
    monkeypatch.setattr(self_test, "PROBES", {"good": lambda _: None, "bad": break_probe})
    report = backend_report(GPU)
    assert (report.backend, report.is_healthy) == ("torch", False)
    assert report.failures == (ProbeFailure("bad", "RuntimeError: out of resources"),)
    assert not uses_triton(GPU)


def test_torch_may_be_asked_for_and_no_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, "torch")
    monkeypatch.setattr(backend, "run_probes", break_probe)
    report = backend_report(GPU)
    assert (report.backend, report.reason) == ("torch", "KVKEEP_KERNELS=torch")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("triton", "KVKEEP_KERNELS=triton: Triton needs a GPU, not cpu"),
        ("Torch", "KVKEEP_KERNELS=Torch: expected torch or triton"),
    ],
)
def test_an_override_that_cannot_be_followed_is_refused(
    asked: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE_VARIABLE, asked)
    with pytest.raises(KernelUnavailable, match=f"^{message}$"):
        backend_report(CPU)


def test_a_platform_without_triton_is_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    assert backend_report(GPU).reason == "triton is not installed"


def test_a_wrong_result_fails_its_probe_even_when_it_is_nan() -> None:
    for out in (torch.full((2,), torch.nan), torch.ones(2)):
        with pytest.raises(self_test.WrongResult):
            self_test._compare(out, torch.zeros(2))


def test_importing_the_kernels_reads_no_environment_and_loads_no_triton() -> None:
    program = (
        "import sys, kvkeep_kernels.attention, kvkeep_kernels.scoring, kvkeep_kernels.compaction;"
        "sys.exit('kvkeep_kernels._triton' in sys.modules)"
    )
    environment = {**os.environ, OVERRIDE_VARIABLE: "nonsense"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.interpreter
def test_the_self_test_tells_right_kernels_from_wrong_ones() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_backend.py"))
