"""Every Triton kernel as it ships, compiled for GPUs that are not here.

Here the arguments of each launch are typed once, for the tests and for the report.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import triton

from kvkeep_kernels._triton import append, compaction, decode, prefill, scoring, softmax, work_list
from kvkeep_kernels.layout import UNBOUNDED, CodeKind, LogitBounds

from .triton_aot import DTYPE_NAMES, MachineCode, compile_for

HEADS, GROUP = 8, 4
"""KV heads, and query heads of each, as Llama-3.1-8B and Qwen3-8B have them."""

Reduction = Literal["max", "plus", "logsum"]

_PARTS = {"part_out": "*fp32", "part_peak": "*fp32", "part_mass": "*fp32"}
_HALVES: dict[CodeKind | None, tuple[str, ...]] = {
    None: (),
    "fp8": ("k_scale", "v_scale"),
    "int8": ("k_scale", "k_zero", "v_scale", "v_zero"),
    "int4": ("k_scale", "k_zero", "v_scale", "v_zero", "k_mean"),
}
_COLUMN_STRIDES = ("q_head_stride", "q_row_stride", "k_head_stride", "k_row_stride")
_ROW_STRIDES = tuple(
    f"{name}_{axis}_stride"
    for name in ("q", "prefix", "chunk", "repeat")
    for axis in ("head", "row")
)
_SHARE_STRIDES = (
    *("k_stride", "v_stride", "tail_k_head_stride", "tail_v_head_stride"),
    *("tail_k_stride", "tail_v_stride"),
)
_GATHER_STRIDES = ("k_head_stride", "k_row_stride", "v_head_stride", "v_row_stride")


def attend_items(
    target: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    rows: int | None = None,
    kind: CodeKind | None = None,
    bounds: LogitBounds = UNBOUNDED,
) -> MachineCode:
    """Decode. ``rows`` of a tile: the most there can be, unless fewer are named."""
    shape = softmax.tile_shape(head_dim, dtype, kind)
    numbers = {"num_tiles": "i32", "num_slots": "i32", "scale_log2": "fp32"}
    tables, absent = _given(bounds.window, sequences="*i64", places="*i64")
    return compile_for(
        target,
        decode.attend_items,
        {
            "q": f"*{DTYPE_NAMES[dtype]}",
            **dict.fromkeys(("tiles", "scales", "runs"), "*i64"),
            "items": "*i32",
            **_PARTS,
            **numbers,
            **tables,
        },
        {
            **absent,
            **_decode_sizes(head_dim, rows or shape.block_m_max),
            "BLOCK_N": shape.block_n,
            "KIND": kind,
            **_bounds(bounds),
        },
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def plan_items(target: str) -> MachineCode:
    """The work list of a decode step."""
    numbers = {"num_tiles": "i32", "num_runs": "i32", "num_slots": "i32"}
    tables = {"tiles": "*i64", "sequences": "*i64", "runs": "*i64"}
    bytes_each = {"CONTEXT_BYTES": 1, "TAIL_BYTES": 2}
    return compile_for(
        target,
        work_list.plan_items,
        {**tables, "indptr": "*i32", "items": "*i32", **numbers},
        {"HEADS": HEADS, **bytes_each, "BLOCK_N": 64, "RUNS": 256, "SLOTS": 512},
    )


def append_rows(target: str, head_dim: int) -> MachineCode:
    """The newest rows of a decode step's tails."""
    strides = [f"{name}_{axis}_stride" for name in "kv" for axis in ("sequence", "head")]
    rows = {"k": "*bf16", "v": "*bf16", "sequences": "*i64"}
    return compile_for(
        target,
        append.append_rows,
        {**rows, **dict.fromkeys(strides, "i32")},
        {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)},
        num_warps=1,
    )


def merge_items(target: str, head_dim: int) -> MachineCode:
    """The merge of a decode step."""
    pointers = {"tiles": "*i64", "sequences": "*i64", "indptr": "*i32", **_PARTS, "out": "*bf16"}
    return compile_for(
        target,
        decode.merge_items,
        {**pointers, "num_tiles": "i32"},
        {**_decode_sizes(head_dim, 64), "BLOCK_I": decode.MERGED_ITEMS},
    )


def attend_shares(
    target: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    kind: CodeKind | None = None,
    bounds: LogitBounds = UNBOUNDED,
) -> MachineCode:
    """A question's new tokens."""
    shape = softmax.tile_shape(head_dim, dtype, kind)
    pointer = f"*{DTYPE_NAMES[dtype]}"
    halves = _HALVES[kind]
    placed, absent = _given(bounds.window, positions="*i32", end="i32")
    return compile_for(
        target,
        prefill.attend_shares,
        {
            **dict.fromkeys(("q", "tail_k", "tail_v"), pointer),
            **dict.fromkeys(("context_k", "context_v"), "*u8" if kind else pointer),
            **dict.fromkeys(halves, "*fp16"),
            "start": "*i32",
            "length": "*i32",
            **_PARTS,
            "tokens": "i32",
            "tail_tokens": "i32",
            "scale_log2": "fp32",
            **dict.fromkeys(_SHARE_STRIDES, "i32"),
            **placed,
        },
        {
            **dict.fromkeys(name for name in _HALVES["int4"] if name not in halves),
            **absent,
            "GROUP": GROUP,
            **_widths(head_dim),
            "BLOCK_M": shape.block_m_max,
            "BLOCK_N": shape.block_n,
            "KIND": kind,
            **_bounds(bounds),
        },
        divisible=_SHARE_STRIDES,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def merge_shares(target: str, head_dim: int) -> MachineCode:
    """The merge of a question's shares."""
    return compile_for(
        target,
        prefill.merge_shares,
        {**_PARTS, "out": "*bf16", "rows": "i32", "shares": "i32"},
        {**_widths(head_dim), "BLOCK_R": prefill.MERGED_ROWS},
    )


def column_reduce(target: str, dtype: torch.dtype, head_dim: int, op: Reduction) -> MachineCode:
    """KVzip takes a maximum without bounds, KVzip+ ("plus") with factors, KVpop a bounded sum."""
    tile, rows = scoring.tile_shape(head_dim, dtype), f"*{DTYPE_NAMES[dtype]}"
    bounds, absent = _given(op == "logsum", first_query="*i32", last_query="*i32")
    factor, no_factor = _given(op == "plus", log_factor="*fp32")
    sizes = dict.fromkeys((*_COLUMN_STRIDES, "rows", "columns", "group_size"), "i32")
    pointers = {"q": rows, "k": rows, "lse": "*fp32", "out": "*fp32"}
    return compile_for(
        target,
        scoring.column_reduce_kernel,
        {**pointers, **bounds, **factor, **sizes, "scale": "fp32"},
        {
            "IS_LOGSUM": op == "logsum",
            **absent,
            **no_factor,
            **_padded(head_dim),
            "BLOCK_COLUMNS": tile.owned,
            "BLOCK_ROWS": tile.streamed,
        },
        divisible=_COLUMN_STRIDES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def row_lse(target: str, dtype: torch.dtype, head_dim: int) -> MachineCode:
    """The first pass of a score."""
    tile, rows = scoring.tile_shape(head_dim, dtype), f"*{DTYPE_NAMES[dtype]}"
    pointers = {**dict.fromkeys(("q", "k_prefix", "k_chunk", "k_repeat"), rows), "lse": "*fp32"}
    tokens = ("prefix_tokens", "chunk_tokens", "repeat_tokens")
    sizes = dict.fromkeys((*_ROW_STRIDES, "rows", "group_size", *tokens), "i32")
    return compile_for(
        target,
        scoring.row_lse_kernel,
        {**pointers, **sizes, "scale": "fp32"},
        {**_padded(head_dim), "BLOCK_ROWS": tile.owned, "BLOCK_KEYS": tile.streamed},
        divisible=_ROW_STRIDES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def gather(target: str, dtype: torch.dtype, head_dim: int) -> MachineCode:
    """The copy of kept rows."""
    rows = dict.fromkeys(("k", "v", "k_out", "v_out"), f"*{DTYPE_NAMES[dtype]}")
    sizes = dict.fromkeys((*_GATHER_STRIDES, "tokens", "rows", "num_kv_heads"), "i32")
    block_rows = compaction.rows_per_program(head_dim)
    return compile_for(
        target,
        compaction.gather_kernel,
        {**rows, "positions": "*i64", "end": "*i32", **sizes},
        {"HEADS": HEADS, **_padded(head_dim), "BLOCK_ROWS": block_rows},
        divisible=_GATHER_STRIDES,
        num_warps=compaction.NUM_WARPS,
    )


def _given(is_given: object, **arguments: str) -> tuple[Mapping[str, str], Mapping[str, None]]:
    """Optional arguments: typed where they are handed in, else constants of None."""
    return (arguments, {}) if is_given else ({}, dict.fromkeys(arguments))


def _bounds(bounds: LogitBounds) -> dict[str, object]:
    return {"WINDOW": bounds.window or 0, "SOFT_CAP": bounds.soft_cap or 0.0}


def _decode_sizes(head_dim: int, block_m: int) -> dict[str, object]:
    return {"HEADS": HEADS, "GROUP": GROUP, **_widths(head_dim), "BLOCK_M": block_m}


def _widths(head_dim: int) -> dict[str, object]:
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}


def _padded(head_dim: int) -> dict[str, object]:
    return {"HEAD_DIM": head_dim, "BLOCK_DIM": triton.next_power_of_2(head_dim)}
