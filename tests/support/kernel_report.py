"""Writes ``docs/kernels.md``: what the Triton kernels ask of a GPU, and what they should take.

Run it where triton is installed; it needs no GPU and some minutes:
``python -m tests.support.kernel_report``.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from kvkeep_kernels._triton.softmax import tile_shape
from kvkeep_kernels._triton.work_list import ITEMS_PER_PROCESSOR
from kvkeep_kernels.layout import CodeKind

from . import kernel_builds as builds
from .triton_aot import TARGETS, MachineCode

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"

Build = Callable[[str], MachineCode]


_BF16, _FP32 = torch.bfloat16, torch.float32
_KINDS: tuple[CodeKind, ...] = ("int8", "fp8", "int4")

CONFIGURATIONS: dict[tuple[str, str], Build] = {
    ("attend_items", "bf16"): partial(builds.attend_items, dtype=_BF16, head_dim=128),
    ("attend_items", "bf16, 16 rows"): partial(
        builds.attend_items, dtype=_BF16, head_dim=128, rows=16
    ),
    ("attend_items", "bf16, width 64"): partial(builds.attend_items, dtype=_BF16, head_dim=64),
    ("attend_items", "bf16, width 256"): partial(builds.attend_items, dtype=_BF16, head_dim=256),
    ("attend_items", "int8"): partial(builds.attend_items, dtype=_BF16, head_dim=128, kind="int8"),
    ("attend_items", "fp8"): partial(builds.attend_items, dtype=_BF16, head_dim=128, kind="fp8"),
    ("attend_items", "int4"): partial(builds.attend_items, dtype=_BF16, head_dim=128, kind="int4"),
    ("attend_items", "fp32"): partial(builds.attend_items, dtype=_FP32, head_dim=128),
    ("plan_items", ""): builds.plan_items,
    ("merge_items", ""): partial(builds.merge_items, head_dim=128),
    ("append_rows", ""): partial(builds.append_rows, head_dim=128),
    ("attend_shares", "bf16"): partial(builds.attend_shares, dtype=_BF16, head_dim=128),
    ("attend_shares", "int8"): partial(
        builds.attend_shares, dtype=_BF16, head_dim=128, kind="int8"
    ),
    ("attend_shares", "fp8"): partial(builds.attend_shares, dtype=_BF16, head_dim=128, kind="fp8"),
    ("attend_shares", "int4"): partial(
        builds.attend_shares, dtype=_BF16, head_dim=128, kind="int4"
    ),
    ("attend_shares", "fp32"): partial(builds.attend_shares, dtype=_FP32, head_dim=128),
    ("merge_shares", ""): partial(builds.merge_shares, head_dim=128),
    ("row_lse_kernel", "bf16"): partial(builds.row_lse, dtype=_BF16, head_dim=128),
    ("column_reduce_kernel", "bf16, maximum"): partial(
        builds.column_reduce, dtype=_BF16, head_dim=128, op="max"
    ),
    ("column_reduce_kernel", "bf16, KVzip+"): partial(
        builds.column_reduce, dtype=_BF16, head_dim=128, op="plus"
    ),
    ("column_reduce_kernel", "bf16, bounded sum"): partial(
        builds.column_reduce, dtype=_BF16, head_dim=128, op="logsum"
    ),
    ("gather_kernel", "bf16"): partial(builds.gather, dtype=_BF16, head_dim=128),
}
"""Every kernel in the forms that ship, heads 128 wide where nothing else is said."""

# One layer of Llama-3.1-8B, and of Qwen3-8B.
_HEADS, _GROUP, _WIDTH = builds.HEADS, builds.GROUP, 128
_COPY, _PRODUCTS, _PROCESSORS = 4.3e12, 800e12, 132
_TAIL = 64


def machine_code() -> Iterator[str]:
    """The table that takes compiling: a line for each kernel and form."""
    yield f"| kernel | form | {' | '.join(TARGETS)} |"
    yield f"|---|---|{'---|' * len(TARGETS)}"
    for (kernel, form), build in CONFIGURATIONS.items():
        cells = [_cell(build(target)) for target in TARGETS]
        yield f"| `{kernel}` | {form} | {' | '.join(cells)} |"


def _cell(code: MachineCode) -> str:
    shared = f"{code.shared_bytes / 1024:.1f}".removesuffix(".0")
    return f"{code.registers} · {code.spills} · {shared} · {code.matrix_instructions}"


def predictions() -> Iterator[str]:
    """The tables that take arithmetic only."""
    yield "### A decode step"
    yield ""
    yield "| tokens | ratio | rows | members | floor MB | moved / floor | GFLOP | H200 µs | bound |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for tokens in (8192, 32768, 131072):
        for ratio in (1.0, 0.5, 0.3, 0.1):
            for members in (1, 16):
                yield _decode_line(tokens, ratio, None, members)
            if ratio == 0.3:
                for kind in _KINDS:
                    yield _decode_line(tokens, ratio, kind, 1)
    yield ""
    yield "### A question of 32 tokens"
    yield ""
    yield "| tokens | ratio | floor MB | moved / floor | GFLOP | H200 µs | bound |"
    yield "|---|---|---|---|---|---|---|"
    for tokens in (8192, 32768, 131072):
        for ratio in (1.0, 0.3):
            yield _question_line(tokens, ratio, 32)
    yield ""
    yield "### The score of a chunk of 1,024 tokens, and the gather of kept rows"
    yield ""
    yield "| what | floor MB | GFLOP | H200 µs | bound |"
    yield "|---|---|---|---|---|"
    yield from _score_lines(64, 1024)
    for tokens in (8192, 32768, 131072):
        rows = round(0.3 * tokens) * _HEADS
        floor = rows * (2 * _row_bytes(None) + 8)
        yield f"| gather, {tokens} tokens at 0.3 | {_limits(floor, floor, 0, is_short=True)} |"


def _row_bytes(kind: CodeKind | None) -> int:
    """K and V of one row of one head, numbers of bf16 where they are no codes."""
    each = {None: 2 * _WIDTH, "int8": _WIDTH + 4, "fp8": _WIDTH + 2, "int4": _WIDTH // 2 + 4}
    return 2 * each[kind]


def _decode_line(tokens: int, ratio: float, kind: CodeKind | None, members: int) -> str:
    length = round(ratio * tokens)
    rows = length * _HEADS
    ends = members * _HEADS * (_TAIL * _row_bytes(None) + 2 * _GROUP * _WIDTH * 2)
    floor = rows * _row_bytes(kind) + ends
    states = _items(length, kind, members) * (_WIDTH + 2) * 4
    flops = 4 * _GROUP * members * _WIDTH * (rows + _HEADS * _TAIL)
    limits = _limits(floor, floor + 2 * states, flops)
    return f"| {tokens} | {ratio} | {kind or 'bf16'} | {members} | {limits} |"


def _items(length: int, kind: CodeKind | None, members: int) -> int:
    """Query rows whose state is written, as ``plan_items`` cuts heads of equal length."""
    block = tile_shape(_WIDTH, _BF16, kind).block_n
    tiles = math.ceil(members * _GROUP / tile_shape(_WIDTH, _BF16).block_m_max)
    runs = (tiles + members) * _HEADS
    slots = max(ITEMS_PER_PROCESSOR * _PROCESSORS, 2 * runs)
    total = _HEADS * (tiles * length + members * _TAIL)
    item = math.ceil(math.ceil(total / (slots - runs)) / block) * block
    over_context = tiles * _HEADS * math.ceil(length / item) * (members * _GROUP // tiles)
    return over_context + members * _HEADS * math.ceil(_TAIL / item) * _GROUP


def _question_line(tokens: int, ratio: float, new: int) -> str:
    length = round(ratio * tokens)
    rows = length * _HEADS
    block_m, block_n = tile_shape(_WIDTH, _BF16)[:2]
    tiles = math.ceil(new * _GROUP / block_m)
    shares = max(1, min(math.ceil(length / block_n), 2 * _PROCESSORS // (tiles * _HEADS)))
    queries = new * _GROUP * _HEADS
    floor = (rows + new * _HEADS) * _row_bytes(None) + 2 * queries * _WIDTH * 2
    states = shares * queries * (_WIDTH + 2) * 4
    flops = 4 * queries * _WIDTH * (length + new / 2)
    return f"| {tokens} | {ratio} | {_limits(floor, floor + 2 * states, flops)} |"


def _score_lines(prefix: int, chunk: int) -> Iterator[str]:
    queries = chunk * _GROUP * _HEADS
    key = _HEADS * _WIDTH * 2
    first = queries * _WIDTH * 2 + (prefix + 2 * chunk) * key + queries * 4
    flops = 2 * queries * _WIDTH * (prefix + chunk + chunk / 2)
    yield f"| row log-sum-exp | {_limits(first, first, flops, is_short=True)} |"
    second = queries * _WIDTH * 2 + chunk * key + queries * 4 + chunk * _HEADS * 4
    flops = 2 * queries * _WIDTH * chunk
    yield f"| column maximum | {_limits(second, second, flops, is_short=True)} |"


def _limits(floor: float, moved: float, flops: float, *, is_short: bool = False) -> str:
    by_memory, by_products = moved / _COPY * 1e6, flops / _PRODUCTS * 1e6
    bound = "memory" if by_memory >= by_products else "products"
    extra = [] if is_short else [f"{moved / floor:.3f}"]
    cells = [f"{floor / 1e6:.2f}", *extra, f"{flops / 1e9:.2f}"]
    return " | ".join([*cells, f"{max(by_memory, by_products):.1f}", bound])


HEADER = """# What the Triton kernels ask of a GPU

Written by `python -m tests.support.kernel_report`; a test keeps it from going stale.
Nothing here was measured on a GPU: the first table is read from machine code, the others are
arithmetic.

## Machine code

Each cell: registers of a thread · spilled loads and stores · KiB of shared memory of a program ·
matrix instructions. Heads are 128 wide, 8 of them with 4 query heads each, where nothing else is
said. fp32 is multiplied in full precision, for which NVIDIA has no matrix instruction.

"""

FORMULAS = """
## Bytes, FLOPs and the roofline of an H200

One layer of Llama-3.1-8B or Qwen3-8B in bf16, heads of equal length, tails of 64 tokens. The
*floor* is what must be read or written once: kept rows, tails, queries and outputs. What is *moved*
adds the partial states, written and read again; they mostly stay in the GPU's cache. The time is
the larger of moved bytes at 4.3 TB/s (a copy, read and written) and FLOPs at 800 TFLOP/s; launches
come on top of it. *Rows* says how numbers of the context are kept.

"""


def main() -> None:
    """Compile everything and write the document."""
    lines = [HEADER, *(f"{line}\n" for line in machine_code()), FORMULAS]
    lines += [f"{line}\n" for line in predictions()]
    DOCUMENT.write_text("".join(lines))


if __name__ == "__main__":
    main()
