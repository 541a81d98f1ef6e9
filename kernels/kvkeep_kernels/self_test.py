"""A small run of every Triton kernel against the fp32 oracle, on the device that shall serve.

Triton kernels fail on particular GPUs: they do not compile, do not launch, or answer wrongly.
A probe takes milliseconds once its kernels are compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep_kernels import reference
from kvkeep_kernels.layout import (
    UNBOUNDED,
    CodeKind,
    ContextRows,
    DecodeBatch,
    DecodeGroup,
    DenseKV,
    KernelError,
    RaggedKV,
)
from kvkeep_kernels.quantize import quantize_kv
from kvkeep_kernels.step_tables import StepGroup, StepShape, StepTables

TOLERANCE = 2e-2
"""The largest error allowed on outputs of about 1: bf16 has 3 digits, a wrong kernel none."""

_HEADS, _GROUP_SIZE, _HEAD_DIM = 3, 2, 64
_SCALE = 0.125
_KINDS: tuple[CodeKind, ...] = ("int8", "int4", "fp8")


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """One operation that a device does not compute, and how that showed."""

    operation: str
    message: str


class WrongResult(KernelError):
    """A kernel ran and its result is not the oracle's."""

    def __init__(self, error: float) -> None:
        super().__init__(f"error {error:.3g}, allowed {TOLERANCE}")
        self.error = error


def run_probes(device: torch.device) -> tuple[ProbeFailure, ...]:
    """Run every probe on ``device``; return those that failed. Waits for the device."""
    failures = []
    for operation, probe in PROBES.items():
        try:
            probe(device)
        # Compilers, drivers and our own check fail in their own ways; each means the same here.
        except Exception as error:  # noqa: BLE001
            failures.append(ProbeFailure(operation, f"{type(error).__name__}: {error}"))
    return tuple(failures)


def _probe_decode(device: torch.device, kind: CodeKind | None = None) -> None:
    from kvkeep_kernels._triton import decode, work_list

    values = _Values(device)
    groups = tuple(
        DecodeGroup(values.context(lengths, kind), tuple(values.tail(tokens) for tokens in tails))
        for lengths, tails in (((0, 1, 150), (1, 70, 2)), ((33, 0, 5), (3,)))
    )
    batch = DecodeBatch(groups)
    q = values.normal(batch.num_sequences, _HEADS * _GROUP_SIZE, _HEAD_DIM)
    out = decode.launch(q, work_list.tabulate(batch, _GROUP_SIZE), scale=_SCALE)
    first = 0
    for group in groups:
        rows = slice(first, first + len(group.tails))
        first += len(group.tails)
        expected = reference.ragged_decode(q[rows], group.context, group.tails, scale=_SCALE)
        _compare(out[rows], expected)


def _probe_step(device: torch.device) -> None:
    values = _Values(device)
    context, own = values.context((0, 1, 60)), values.tail(3)
    rows = torch.zeros(1, 2, _HEADS, 8, _HEAD_DIM, dtype=own.k.dtype, device=device)
    rows[0, 0, :, :2], rows[0, 1, :, :2] = own.k[:, :2], own.v[:, :2]
    # Room for two, of which one is there.
    shape = StepShape(
        (UNBOUNDED,), 2, _HEADS, _GROUP_SIZE, _HEAD_DIM, own.k.dtype, None, tile_rows=16
    )
    numbers = torch.zeros(shape.numbers, dtype=torch.int64, device=device)
    tables = StepTables(shape, numbers)
    numbers.copy_(torch.tensor(tables.describe([StepGroup([context], (rows,))])))
    tables.set_tail_tokens(torch.tensor([3, 1], device=device))
    tables.append(0, own.k[:, 2].expand(2, -1, -1), own.v[:, 2].expand(2, -1, -1))
    q = values.normal(2, _HEADS * _GROUP_SIZE, _HEAD_DIM)
    out = tables.attend(0, q, scale=_SCALE)
    _compare(out[:1], reference.ragged_decode(q[:1], context, [own], scale=_SCALE))


def _probe_prefill(device: torch.device, kind: CodeKind | None = None) -> None:
    from kvkeep_kernels._triton import prefill

    values = _Values(device)
    context, tail = values.context((0, 1, 150), kind), values.tail(12)
    q = values.normal(_HEADS * _GROUP_SIZE, 5, _HEAD_DIM)
    out = prefill.launch(q, context, tail, scale=_SCALE)
    _compare(out, reference.ragged_prefill(q, context, tail, scale=_SCALE))


def _probe_quantised(device: torch.device) -> None:
    for kind in _KINDS:
        _probe_decode(device, kind)
        _probe_prefill(device, kind)


def _probe_scoring(device: torch.device) -> None:
    from kvkeep_kernels._triton import scoring

    values = _Values(device)
    prefix, chunk, repeat = (values.normal(_HEADS, n, _HEAD_DIM) for n in (5, 70, 30))
    q = values.normal(_HEADS * _GROUP_SIZE, 20, _HEAD_DIM)
    lse = scoring.row_lse(q, prefix, chunk, repeat, scale=_SCALE)
    expected = reference.row_lse(*(part.cpu() for part in (q, prefix, chunk, repeat)), scale=_SCALE)
    _compare(lse.cpu(), expected)
    own = (q.cpu(), chunk.cpu(), lse.cpu())
    first, last = torch.arange(70) // 4, torch.full((70,), 20)
    highest = scoring.column_reduce(q, chunk, lse, None, None, "max", scale=_SCALE)
    expected = reference.column_reduce(*own, first * 0, last, "max", scale=_SCALE)
    _compare(highest.cpu(), expected)
    summed = scoring.column_reduce(q, chunk, lse, first.to(device), None, "logsum", scale=_SCALE)
    expected = reference.column_reduce(*own, first, last, "logsum", scale=_SCALE)
    _compare(summed.cpu(), expected)


def _probe_gather(device: torch.device) -> None:
    from kvkeep_kernels._triton import compaction

    values = _Values(device)
    cache, length = values.tail(40), torch.tensor([30, 0, 5], dtype=torch.int32)
    position = torch.arange(35) * 7 % 40
    head = torch.repeat_interleave(torch.arange(_HEADS), length)
    k, v = compaction.gather(cache, position.to(device), length.to(device))
    _compare(k.cpu(), cache.k.cpu()[head, position].float())
    _compare(v.cpu(), cache.v.cpu()[head, position].float())


PROBES: dict[str, Callable[[torch.device], None]] = {
    "ragged_decode": _probe_decode,
    "decode_step": _probe_step,
    "ragged_prefill": _probe_prefill,
    "quantized_rows": _probe_quantised,
    "column_reduce": _probe_scoring,
    "compact": _probe_gather,
}
"""Every operation with a Triton kernel: raises when the device does not compute it."""


class _Values:
    """Inputs that are the same on every device and leave torch's own generators alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Triton's interpreter, the only thing that runs these on a CPU, multiplies no bf16.
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def context(self, lengths: tuple[int, ...], kind: CodeKind | None = None) -> ContextRows:
        length = torch.tensor(lengths, dtype=torch.int32)
        start = (torch.cumsum(length, 0) - length).to(torch.int32)
        k, v = self.normal(2, sum(lengths), _HEAD_DIM)
        rows = RaggedKV(k, v, start.to(self._device), length.to(self._device))
        if kind is None:
            return rows
        means = self.normal(len(lengths), _HEAD_DIM).half() if kind == "int4" else None
        return quantize_kv(rows, kind, means)

    def tail(self, tokens: int) -> DenseKV:
        k, v = self.normal(2, _HEADS, tokens, _HEAD_DIM)
        return DenseKV(k, v)


def _compare(out: Tensor, expected: Tensor) -> None:
    error = float((out.float() - expected).abs().max())
    # Not "error > TOLERANCE", which a NaN would pass.
    if not error <= TOLERANCE:
        raise WrongResult(error)
