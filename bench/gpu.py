"""The kernels on a GPU: right first, then how fast, as ratios against stock attention.

Run by ``gpu.sh``. Needs torch, triton and ``kernels/`` only, but for a whole step, which needs the
service's packages and is left out without them. With ``--small`` it goes through every
step in tiny sizes wherever the Triton kernels run, the interpreter on a CPU included: a rehearsal,
whose figures mean nothing.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from kvkeep_bench.gpu_checks import run_checks
from kvkeep_bench.gpu_clock import Clock, OutOfTime, Step
from kvkeep_bench.gpu_dense import dense_ways
from kvkeep_bench.gpu_values import KINDS, LLAMA_8B, Shape, Values
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep_kernels import attention, compaction, scoring
from kvkeep_kernels._triton import decode, work_list
from kvkeep_kernels.backend import backend_report
from kvkeep_kernels.layout import CodeKind, ContextRows, DecodeBatch, DecodeGroup, DenseKV

_TAIL_TOKENS = 64
# Operands of one graph exceed the cache of an H200 (50 MB) several times.
_COLD_BYTES = 400 * 2**20


class Report:
    """Lines that are printed at once and kept for the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []

    def add(self, line: str = "") -> None:
        """Print a line and write the file again, so that a run cut short leaves what it has."""
        print(line, flush=True)
        self._lines.append(line)
        self._path.write_text("\n".join(self._lines) + "\n")


class Bench:
    """The measurements, most important first."""

    def __init__(self, device: torch.device, clock: Clock, report: Report, *, small: bool) -> None:
        self._device = device
        self._clock = clock
        self._report = report
        self._small = small
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._values = Values(device, self._dtype, seed=0)
        self._copy_rate = 0.0

    def ceilings(self) -> None:
        """Copy bandwidth, read and written, and the rate of a bf16 product."""
        size = 2**16 if self._small else 2**30
        source = torch.empty(size, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        time = self._clock.milliseconds([lambda: target.copy_(source)])
        self._copy_rate = 2 * size / time * 1e3
        side = 64 if self._small else 8192
        left, right = self._values.normal(side, side), self._values.normal(side, side)
        product = self._clock.milliseconds([lambda: torch.mm(left, right)])
        self._report.add(f"- copy {self._copy_rate / 1e12:.2f} TB/s (read and written)")
        self._report.add(f"- product of {side}: {2 * side**3 / product / 1e9:.0f} TFLOP/s")

    def decode(self) -> None:
        """Attention of one step at every length, ratio and batch, against the full cache."""
        self._report.add()
        self._report.add("## Decode attention, one layer, one step")
        self._report.add()
        self._report.add(
            "| tokens | batch | ratio | ms | / best dense | bar | bytes/s of copy | launched ms |"
        )
        self._report.add("|---|---|---|---|---|---|---|---|")
        lengths = (64,) if self._small else (32768, 8192, 131072)
        for tokens in lengths:
            one = 0.0
            batches = ((1, True), (8, True), (16, True), (8, False), (16, False))
            for batch, is_shared in ((1, True), (2, False)) if self._small else batches:
                dense, name = self._best_dense(LLAMA_8B, tokens, batch, is_shared)
                for ratio in (0.3,) if self._small else (1.0, 0.5, 0.3, 0.1):
                    took, launched, read = self._ragged(LLAMA_8B, tokens, batch, is_shared, ratio)
                    if batch == 1 and ratio == 0.3:
                        one = took
                    bar = self._bar(tokens, batch, is_shared, ratio, took, one)
                    kind = "shared" if is_shared else "distinct"
                    self._report.add(
                        f"| {tokens} | {batch} {kind if batch > 1 else ''} | {ratio} | {took:.4f} "
                        f"| {took / dense:.3f} ({name} {dense:.4f}) | {bar} "
                        f"| {read / took * 1e3 / self._copy_rate:.2f} | {launched:.4f} |"
                    )

    def step(self) -> None:
        """A whole step of a model, with all its layers, from the host's point of view."""
        self._report.add()
        self._report.add("## Decode step, captured / launched")
        self._report.add()
        try:
            # The other figures need none of the packages that this one does.
            from kvkeep_bench.gpu_step import step_lines
        except ImportError as error:
            self._report.add(f"Not measured: {error}")
            return
        self._report.add("| tokens | batch | launched ms | captured ms | ratio | steps |")
        self._report.add("|---|---|---|---|---|---|")
        self._clock.require(2.0 if self._small else 60.0)
        for line in step_lines(self._device, small=self._small):
            self._report.add(line)

    def question(self) -> None:
        """A question of 32 tokens over a compressed context, against SDPA over the full one."""
        self._report.add()
        self._report.add("## Question of 32 tokens, one layer")
        self._report.add()
        self._report.add("| tokens | ratio | ms | / SDPA on the full cache |")
        self._report.add("|---|---|---|---|")
        shape, new = LLAMA_8B, 4 if self._small else 32
        for tokens in (64,) if self._small else (8192, 32768, 131072):
            q = self._values.normal(shape.num_q_heads, new, shape.head_dim)
            tail = self._values.dense(shape, new)
            full = [self._values.dense(shape, tokens) for _ in range(self._copies(shape, tokens))]
            dense = self._clock.milliseconds([_sdpa_step(q[None], kv, shape.scale) for kv in full])
            del full
            for ratio in (1.0, 0.3):
                contexts = self._contexts(shape, tokens, ratio)
                took = self._clock.milliseconds(
                    [
                        _step(attention.ragged_prefill, q, context, tail, shape.scale)
                        for context in contexts
                    ]
                )
                self._report.add(f"| {tokens} | {ratio} | {took:.4f} | {took / dense:.3f} |")

    def scores(self) -> None:
        """The score of one chunk against one forward of stock attention of the same shape."""
        self._report.add()
        self._report.add("## KVzip scores of one chunk, one layer (bar: ≤ 1.3)")
        self._report.add()
        self._report.add("| rows x columns | pass 1 ms | pass 2 ms | both / stock forward |")
        self._report.add("|---|---|---|---|")
        shape, values = LLAMA_8B, self._values
        for size in (32,) if self._small else (1024, 2048, 4096):
            prefix, chunk, repeat = (values.dense(shape, n) for n in (64, size, size))
            q = values.normal(shape.num_q_heads, size, shape.head_dim)
            lse = scoring.row_lse(q, prefix.k, chunk.k, repeat.k, scale=shape.scale)
            first = self._clock.milliseconds(
                [_step(scoring.row_lse, q, prefix.k, chunk.k, repeat.k, shape.scale)]
            )
            second = self._clock.milliseconds(
                [_step(scoring.chunk_max_attention, q, chunk.k, lse, shape.scale)]
            )
            stock = self._clock.milliseconds([_sdpa_step(q[None], chunk, shape.scale)])
            ratio = (first + second) / stock
            self._report.add(f"| {size} | {first:.4f} | {second:.4f} | {ratio:.2f} |")

    def compaction(self) -> None:
        """Selection over all layers and heads, and the gather of one layer."""
        self._report.add()
        self._report.add("## Selection and gather")
        self._report.add()
        shape, layers, tokens = LLAMA_8B, 32, 128 if self._small else 32768
        scores = torch.rand(layers, shape.num_kv_heads, tokens, device=self._device)
        protected = torch.zeros(tokens, dtype=torch.bool)
        protected[:30] = True
        select = self._clock.milliseconds_launched(
            lambda: compaction.select(scores, protected, (0.1, 0.3))
        )
        chosen = compaction.select(scores, protected, (0.1, 0.3))
        cache, where = self._values.dense(shape, tokens), chosen.positions[0]
        length = chosen.counts[:, 0].sum(0).to(torch.int32)
        gather = self._clock.milliseconds_launched(lambda: compaction.compact(cache, where, length))
        moved = 4 * len(where) * shape.head_dim * cache.k.element_size()
        rate = moved / gather * 1e3 / self._copy_rate
        self._report.add(f"- select {layers} x {shape.num_kv_heads} x {tokens}: {select:.2f} ms")
        self._report.add(f"- gather of one layer: {gather:.3f} ms, {rate:.2f} of copy (bar ≥ 0.7)")

    def quantized(self) -> None:
        """The same over codes, against plain rows at the same ratio."""
        self._report.add()
        self._report.add("## Decode over codes, ratio 0.3, one layer, one step")
        self._report.add()
        self._report.add("| tokens | batch | codes | ms | / plain rows | bytes/s of copy |")
        self._report.add("|---|---|---|---|---|---|")
        for tokens in (64,) if self._small else (32768, 131072):
            for batch in (1,) if self._small else (1, 16):
                plain, _, _ = self._ragged(LLAMA_8B, tokens, batch, True, 0.3)
                for kind in KINDS:
                    took, _, read = self._ragged(LLAMA_8B, tokens, batch, True, 0.3, kind)
                    self._report.add(
                        f"| {tokens} | {batch} shared | {kind} | {took:.4f} | {took / plain:.3f} "
                        f"| {read / took * 1e3 / self._copy_rate:.2f} |"
                    )

    def _ragged(
        self,
        shape: Shape,
        tokens: int,
        batch: int,
        is_shared: bool,
        ratio: float,
        kind: CodeKind | None = None,
    ) -> tuple[float, float, int]:
        """Milliseconds captured, milliseconds launched from the host, and bytes read once."""
        q = self._values.queries(shape, batch)
        contexts = self._contexts(shape, tokens, ratio, 1 if is_shared else batch, kind)
        tails = tuple(self._values.dense(shape, _TAIL_TOKENS) for _ in range(batch))
        if is_shared:
            batches = [DecodeBatch((DecodeGroup(context, tails),)) for context in contexts]
        else:
            cuts = [contexts[at : at + batch] for at in range(0, len(contexts), batch)]
            batches = [
                DecodeBatch(tuple(DecodeGroup(c, (t,)) for c, t in zip(cut, tails, strict=True)))
                for cut in cuts
            ]
        tables = [work_list.tabulate(one, shape.group_size) for one in batches]
        steps = [_step(decode.launch, q, table, shape.scale) for table in tables]
        took = self._clock.milliseconds(steps)
        launched = self._clock.milliseconds_launched(
            lambda: attention.ragged_decode_batch(q, batches[0], scale=shape.scale)
        )
        read = sum(group.context.size_bytes for group in batches[0].groups)
        return took, launched, read

    def _contexts(
        self,
        shape: Shape,
        tokens: int,
        ratio: float,
        batch: int = 1,
        kind: CodeKind | None = None,
    ) -> Sequence[ContextRows]:
        lengths = self._values.lengths(shape, tokens, ratio)
        size = ratio / {None: 1, "int8": 2, "fp8": 2, "int4": 4}[kind]
        count = batch * self._copies(shape, round(tokens * size * batch))
        if kind is not None:
            return [self._values.quantized(shape, lengths, kind) for _ in range(count)]
        return [self._values.context(shape, lengths) for _ in range(count)]

    def _copies(self, shape: Shape, tokens: int) -> int:
        """How many operands exceed the cache."""
        return 2 if self._small else max(2, -(-_COLD_BYTES // max(1, shape.full_bytes(tokens))))

    def _best_dense(
        self, shape: Shape, tokens: int, batch: int, is_shared: bool
    ) -> tuple[float, str]:
        """The fastest stock attention of one token over the full cache, and its name.

        Stock attention knows no shared context: members are sequences over equal rows, of which
        one copy is expanded, so that it may at least find them in the cache.
        """
        size = (1 if is_shared else batch, shape.num_kv_heads, tokens, shape.head_dim)
        copies = self._copies(shape, tokens * (1 if is_shared else batch))
        caches = [(self._values.normal(*size), self._values.normal(*size)) for _ in range(copies)]
        if is_shared:
            caches = [(k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)) for k, v in caches]
        q = self._values.normal(batch, shape.num_q_heads, 1, shape.head_dim)
        folded = q.view(batch, shape.num_kv_heads, shape.group_size, shape.head_dim)
        found: dict[str, float] = {}
        for name, steps in dense_ways(q, folded, caches, shape.scale):
            try:
                found[name] = self._clock.milliseconds(steps)
            except (RuntimeError, TypeError, ValueError) as error:
                self._report.add(f"<!-- {name} does not run: {str(error).splitlines()[0]} -->")
        best = min(found, key=lambda name: found[name])
        return found[best], best

    def _bar(
        self, tokens: int, batch: int, is_shared: bool, ratio: float, took: float, one: float
    ) -> str:
        if ratio != 0.3 or tokens != 32768:
            return ""
        if batch == 1:
            return "≤ 0.33 of dense"
        if batch == 16 and is_shared:
            return f"{took / one:.2f} of one (≤ 1.3)"
        return ""


def _step(call: Callable[..., object], *operands: object) -> Step:
    """A call whose last operand is the scale."""
    *values, scale = operands
    return lambda: call(*values, scale=scale)


def _sdpa_step(q: Tensor, kv: DenseKV, scale: float) -> Step:
    return lambda: scaled_dot_product_attention(
        q, kv.k[None], kv.v[None], scale=scale, enable_gqa=True
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=540.0, help="budget of the whole run")
    parser.add_argument("--report", type=Path, default=Path("bench/results/gpu.md"))
    parser.add_argument("--small", action="store_true", help="rehearse in tiny sizes")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.report.parent.mkdir(parents=True, exist_ok=True)
    report = Report(options.report)
    rehearsed = {"warm_ups": 1, "repeats": 1} if options.small else {}
    clock = Clock(device, options.seconds, **rehearsed)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU (rehearsal)"
    report.add("# Kernels on a GPU")
    report.add()
    report.add(f"{name}; torch {torch.__version__}, triton {triton.__version__}; bf16")
    report.add()
    os.environ.setdefault("KVKEEP_KERNELS", "triton")
    chosen = backend_report(device)
    report.add(f"- kernels: {chosen.backend} ({chosen.reason})")
    for failure in chosen.failures:
        report.add(f"  - {failure.operation}: {failure.message}")
    wrong = 0
    for check in run_checks(device, small=options.small):
        wrong += not check.passed
        verdict = "right" if check.passed else "WRONG"
        report.add(
            f"- {verdict}: {check.name}: error {check.error:.2e}, allowed {check.allowed:.2e}"
        )
    if chosen.backend != "triton":
        report.add("The Triton kernels do not serve here: nothing to time.")
        return 1
    bench = Bench(device, clock, report, small=options.small)
    parts = (bench.ceilings, bench.decode, bench.step, bench.quantized, bench.question)
    for part in (*parts, bench.scores, bench.compaction):
        try:
            part()
        except OutOfTime:
            report.add(f"- {part.__name__}: the time was spent")
        except torch.OutOfMemoryError:
            report.add(f"- {part.__name__}: the memory was spent")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
