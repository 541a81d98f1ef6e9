"""Runs cut into segments, one for each thread, answer as whole ones do."""

from collections.abc import Iterator

import pytest
import torch

from kvkeep_kernels import reference
from kvkeep_kernels.attention import ragged_decode, ragged_prefill
from kvkeep_kernels.cpu_attention import segments
from kvkeep_kernels.layout import RaggedKV

from ...support.ragged_values import dense, ragged

# Divided by two and by three threads with and without rows left over; short beside long.
LENGTHS = ([1536, 2048], [1537, 1539], [1600, 1, 2], [0, 1541, 7], [1024, 0, 513])


@pytest.fixture(params=[1, 2, 3], ids="threads={}".format, autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_step_over_segments_equals_the_oracle(lengths: list[int], threads: int) -> None:
    context, heads = ragged(lengths, 64, seed=1), len(lengths)
    cut = [run for run in segments(context) if run is not None]
    expected = max(1, min(threads, max(lengths) // 512))
    assert max(run.k.shape[1] for run in cut) == expected
    tails = [dense(heads, tokens, 64) for tokens in (1, 9, 2)]
    q = torch.randn(3, heads * 3, 64)
    out = ragged_decode(q, context, tails, scale=0.3)
    oracle = reference.ragged_decode(q, context, tails, scale=0.3)
    torch.testing.assert_close(out, oracle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_question_over_segments_equals_the_oracle(lengths: list[int]) -> None:
    context, heads = ragged(lengths, 64, seed=2), len(lengths)
    tail, q = dense(heads, 9, 64), torch.randn(heads * 2, 5, 64)
    out = ragged_prefill(q, context, tail, scale=0.3)
    oracle = reference.ragged_prefill(q, context, tail, scale=0.3)
    torch.testing.assert_close(out, oracle, rtol=1e-4, atol=1e-5)


def test_bf16_error_over_segments_is_at_most_twice_that_of_stock_attention() -> None:
    context = ragged([1537], 64, seed=5, dtype=torch.bfloat16)
    tail = dense(1, 9, 64, torch.bfloat16)
    q = torch.randn(1, 4, 64, dtype=torch.bfloat16)
    k, v = torch.cat([context.k, tail.k[0]]), torch.cat([context.v, tail.v[0]])
    exact = torch.softmax((q[0].double() @ k.double().T) * 0.125, -1) @ v.double()
    stock = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.expand(4, -1, -1), v.expand(4, -1, -1), scale=0.125
    )[:, 0]
    ours = ragged_decode(q, context, [tail], scale=0.125)[0]
    assert (ours.double() - exact).norm() <= 2 * (stock.double() - exact).norm()


def test_rows_in_wider_buffers_are_read_where_they_stand() -> None:
    whole = ragged([1537, 1030], 128, seed=3)
    context = RaggedKV(whole.k[:, 64:], whole.v[:, :64], whole.start, whole.length)
    q, tail = torch.randn(1, 4, 64), dense(2, 3, 64)
    out = ragged_decode(q, context, [tail], scale=0.2)
    oracle = reference.ragged_decode(q, context, [tail], scale=0.2)
    torch.testing.assert_close(out, oracle, rtol=1e-4, atol=1e-5)


def test_rows_that_arrive_after_a_step_are_seen_and_those_behind_a_shorter_run_are_not() -> None:
    context, q, tail = ragged([1537, 1030], 64, seed=4), torch.randn(1, 4, 64), dense(2, 3, 64)
    ragged_decode(q, context, [tail], scale=0.2)
    context.k.normal_()
    context.v.normal_()
    again = ragged_decode(q, context, [tail], scale=0.2)
    oracle = reference.ragged_decode(q, context, [tail], scale=0.2)
    torch.testing.assert_close(again, oracle, rtol=1e-4, atol=1e-5)
    shorter = context.truncated(torch.tensor([1029, 11], dtype=torch.int32))
    context.k[1029:1537], context.v[1029:1537] = torch.nan, torch.nan
    out = ragged_decode(q, shorter, [tail], scale=0.2)
    oracle = reference.ragged_decode(q, shorter, [tail], scale=0.2)
    torch.testing.assert_close(out, oracle, rtol=1e-4, atol=1e-5)
