"""Triton kernels compiled for GPUs that are not here, and what their machine code shows."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHARED_BYTES_MAX = 99 * 1024
"""What a program may ask for on the smallest of the GPUs in use (sm_86, sm_89)."""

_WIDE_LOAD = re.compile(r"\b(?:LDGSTS|LDG)\S*\.128\b|\b(?:global|buffer)_load_dwordx4\b")
_MATRIX_INSTRUCTION = re.compile(r"\b(?:[HIDQ]MMA|HGMMA|IGMMA|QGMMA|UTC[A-Z]*MMA|v_s?mfmac?_\w+)\b")
_TRITON_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What one compiled kernel asks of its GPU.

    registers: per thread (vector registers on AMD). spills: register loads and stores to local
    memory. shared_bytes: per program. matrix_instructions: mma, wgmma, tcgen05 or mfma.
    """

    target: str
    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: int
    text: str

    @property
    def has_wide_loads(self) -> bool:
        """Whether threads load 16 bytes at a time: the compiler knows rows to be aligned."""
        return _WIDE_LOAD.search(self.text) is not None


def compile_for(
    target: str,
    kernel: object,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    divisible: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 2,
) -> MachineCode:
    """Compile a jit function as a launch would, without a GPU.

    ``signature`` types the run-time arguments ("*bf16", "i32", "i64", "fp32"); ``constants`` the
    constexpr ones; together they name every argument. Pointers count as 16-byte aligned, as torch
    allocates them; ``divisible`` names integers that are multiples of 16.
    """
    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    assert set(names) == {*signature, *constants}, "an argument has no type, or a type no argument"
    aligned = [name for name in names if types[name].startswith("*") or name in divisible]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiled = triton.compile(
        ASTSource(kernel, signature=types, constexprs=dict(constants), attrs=attributes),
        target=TARGETS[target],
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    if target.startswith("sm_"):
        return _read_cubin(target, compiled.asm["cubin"], compiled.metadata.shared)
    return _read_amdgcn(target, compiled.asm["amdgcn"], compiled.metadata.shared)


def _read_cubin(target: str, cubin: bytes, shared_bytes: int) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        text = _cuobjdump("-sass", file.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    spills = len(re.findall(r"\b(?:STL|LDL)\b", text))
    matrix = len(_MATRIX_INSTRUCTION.findall(text))
    return MachineCode(target, registers, spills, shared_bytes, matrix, text)


def _read_amdgcn(target: str, text: str, shared_bytes: int) -> MachineCode:
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
    spills = sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text))
    matrix = len(_MATRIX_INSTRUCTION.findall(text))
    return MachineCode(target, registers, spills, shared_bytes, matrix, text)


def _cuobjdump(*arguments: str) -> str:
    # It finds nvdisasm, which it runs, on the path.
    environment = {**os.environ, "PATH": f"{_TRITON_BIN}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [_TRITON_BIN / "cuobjdump", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return result.stdout


def run_interpreted(module: Path) -> None:
    """Run a test module in a child pytest under Triton's interpreter; fail with its output.

    The interpreter is chosen when triton is imported, so it needs a process of its own. Such a
    module is named without ``test_``: on its own it cannot run, and pytest passes it by.
    """
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "KVKEEP_KERNELS": "triton",
        "PYTHONSAFEPATH": "1",
    }
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", module],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " skipped" not in result.stdout, result.stdout
