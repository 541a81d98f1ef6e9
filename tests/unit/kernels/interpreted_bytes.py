"""Bytes that a decode step reads, counted load by load; run by ``test_triton_decode``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from kvkeep_kernels.attention import ragged_decode, ragged_prefill
from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.layout import CodeKind, ContextRows, QuantizedKV

from ...support.ragged_values import dense, quantized, ragged

HEAD_DIM, GROUP = 64, 2


class Counter:
    """Bytes that kernels load from some tensors, as often as they load them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        self.size_bytes = 0

    def add(self, addresses: Any, mask: Any, element_bytes: int) -> None:
        for first, end in self._spans:
            is_loaded = mask & (addresses >= first) & (addresses < end)
            self.size_bytes += int(is_loaded.sum()) * element_bytes


@contextmanager
def counted(context: ContextRows) -> Iterator[Counter]:
    """Count what is read of a context's numbers, and of the scales beside them."""
    tensors = [context.k, context.v]
    if isinstance(context, QuantizedKV):
        tensors += [context.k_scale, context.v_scale]
        tensors += [zero for zero in (context.k_zero, context.v_zero) if zero is not None]
    counter, builder = Counter(tensors), interpreter.InterpreterBuilder
    stock = builder.create_masked_load

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        element = ptrs.dtype.scalar.element_ty
        counter.add(ptrs.data, mask.data, element.primitive_bitwidth // 8)
        return stock(self, ptrs, mask, *rest)

    builder.create_masked_load = load
    try:
        yield counter
    finally:
        builder.create_masked_load = stock


def bytes_of_a_step(context: ContextRows, members: int) -> int:
    heads = context.num_kv_heads
    tails = [dense(heads, 3, HEAD_DIM) for _ in range(members)]
    q = torch.randn(members, heads * GROUP, HEAD_DIM)
    with counted(context) as counter:
        ragged_decode(q, context, tails, scale=0.1)
    return counter.size_bytes


def kept(rows: tuple[int, ...], kind: CodeKind | None) -> ContextRows:
    return quantized(ragged(rows, HEAD_DIM, seed=1), kind)


ROW_BYTES: dict[CodeKind | None, int] = {
    None: 2 * HEAD_DIM * 4,
    "int8": 2 * (HEAD_DIM + 4),
    "int4": 2 * (HEAD_DIM // 2 + 4),
    "fp8": 2 * (HEAD_DIM + 2),
}


def test_triton_serves_these_tests() -> None:
    assert uses_triton(torch.device("cpu"))


@pytest.mark.parametrize("kind", ROW_BYTES)
@pytest.mark.parametrize("rows", [(0, 1), (20, 300), (130, 700)], ids=str)
def test_a_step_reads_every_kept_row_once_and_nothing_else(
    rows: tuple[int, ...], kind: CodeKind | None
) -> None:
    assert bytes_of_a_step(kept(rows, kind), members=1) == sum(rows) * ROW_BYTES[kind]


@pytest.mark.parametrize("kind", ROW_BYTES)
def test_a_lower_ratio_of_the_same_buffers_reads_less_in_proportion(kind: CodeKind | None) -> None:
    context = kept((400, 200), kind)
    half = context.truncated(context.length // 2)
    assert 2 * bytes_of_a_step(half, 1) == bytes_of_a_step(context, 1)


def test_members_of_one_tile_read_their_context_together() -> None:
    context = kept((20, 300), None)
    alone = bytes_of_a_step(context, 1)
    # A tile of fp32 has 32 rows: 16 members of 2 query rows each; the next begins another.
    assert [bytes_of_a_step(context, members) for members in (2, 16, 17)] == [
        alone,
        alone,
        2 * alone,
    ]


def test_a_question_of_one_tile_reads_every_kept_row_once() -> None:
    context = kept((20, 300), None)
    q, tail = torch.randn(2 * GROUP, 8, HEAD_DIM), dense(2, 8, HEAD_DIM)
    with counted(context) as counter:
        ragged_prefill(q, context, tail, scale=0.1)
    assert counter.size_bytes == 320 * ROW_BYTES[None]
