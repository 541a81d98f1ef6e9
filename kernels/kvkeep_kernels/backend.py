"""The one choice between Triton's kernels and torch's, per device, and why it fell so.

A GPU gets the Triton kernels once they have passed the self-test on it; a kernel that fails
there is reported and torch serves instead. A CPU gets torch. ``KVKEEP_KERNELS=torch|triton``
overrides, but never a failed self-test: nobody can ask for wrong answers.

The environment is read and the test is run when a device is first asked about, once for the
life of the process: a worker asks at its start, because the first answer compiles kernels,
waits for the device and must not fall into a graph capture.
"""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from kvkeep_kernels import stock_flash
from kvkeep_kernels.layout import KernelUnavailable
from kvkeep_kernels.self_test import ProbeFailure, run_probes

OVERRIDE_VARIABLE = "KVKEEP_KERNELS"


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Which kernels serve a device, as health shows it.

    reason: one clause for people. failures: the probes that kept Triton from serving, or, beside
    Triton, torch's own kernels from serving dense attention.
    """

    backend: Literal["torch", "triton"]
    device: str
    reason: str
    failures: tuple[ProbeFailure, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether the kernels that were to serve do serve."""
        return not self.failures


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on ``device`` go to the Triton kernels. Raises: as ``backend_report``."""
    return backend_report(device).backend == "triton"


@cache
def backend_report(device: torch.device) -> BackendReport:
    """Choose the kernels of a device, testing them where they are Triton's.

    Raises: KernelUnavailable, when the override is no known name, or asks for Triton where it
        cannot run at all.
    """
    asked = os.environ.get(OVERRIDE_VARIABLE, "")
    request = f"{OVERRIDE_VARIABLE}={asked}"
    if asked not in {"", "torch", "triton"}:
        raise KernelUnavailable(request, "expected torch or triton")
    if asked == "torch":
        return BackendReport("torch", str(device), request)
    obstacle = _obstacle(device)
    if obstacle is not None:
        if asked == "triton":
            raise KernelUnavailable(request, obstacle)
        return BackendReport("torch", str(device), obstacle)
    failures = run_probes(device)
    if failures:
        return BackendReport("torch", str(device), "the Triton self-test failed", failures)
    passed = "the Triton self-test passed"
    dense = stock_flash.failure(device) if device.type == "cuda" else None
    if dense is not None:
        failure = ProbeFailure("dense_prefill", dense)
        reason = f"{passed}; dense attention makes whole logits: {dense}"
        return BackendReport("triton", str(device), reason, (failure,))
    return BackendReport("triton", str(device), passed)


def _obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run here at all, or nothing."""
    if find_spec("triton") is None:
        return "triton is not installed"
    # ROCm devices call themselves cuda. The interpreter is triton's own, for tests.
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type == "cuda" or is_interpreted:
        return None
    return f"Triton needs a GPU, not {device.type}"
