"""The CPU path equals the fp32 oracle, over odd shapes, empty heads and tails of one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels import reference
from kvkeep_kernels.attention import (
    attend_also,
    dense_prefill,
    ragged_decode,
    ragged_decode_batch,
    ragged_prefill,
)
from kvkeep_kernels.layout import DecodeBatch, DecodeGroup, DenseKV, RaggedKV, ShapeError

from ...support.ragged_values import dense, ragged

HEAD_DIMS = (64, 96, 128, 256)


shapes = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.sampled_from([0, 1, 2, 7, 33, 130]), min_size=1, max_size=4),
        "group_size": st.integers(1, 8),
        "head_dim": st.sampled_from(HEAD_DIMS),
        "seed": st.integers(0, 10_000),
    }
)


@settings(max_examples=40)
@given(shape=shapes, tails=st.lists(st.sampled_from([1, 2, 5, 65]), min_size=1, max_size=4))
def test_ragged_decode_equals_the_oracle(shape: dict, tails: list[int]) -> None:
    context = ragged(shape["lengths"], shape["head_dim"], shape["seed"])
    heads = context.num_kv_heads
    own = [dense(heads, tokens, shape["head_dim"]) for tokens in tails]
    q = torch.randn(len(tails), heads * shape["group_size"], shape["head_dim"])
    out = ragged_decode(q, context, own, scale=0.3)
    torch.testing.assert_close(
        out, reference.ragged_decode(q, context, own, scale=0.3), rtol=1e-4, atol=3e-5
    )


@settings(max_examples=25)
@given(shape=shapes, tokens=st.integers(1, 9), earlier=st.integers(0, 5))
def test_ragged_prefill_equals_the_oracle(shape: dict, tokens: int, earlier: int) -> None:
    context = ragged(shape["lengths"], shape["head_dim"], shape["seed"])
    heads = context.num_kv_heads
    tail = dense(heads, earlier + tokens, shape["head_dim"])
    q = torch.randn(heads * shape["group_size"], tokens, shape["head_dim"])
    out = ragged_prefill(q, context, tail, scale=0.3)
    torch.testing.assert_close(
        out, reference.ragged_prefill(q, context, tail, scale=0.3), rtol=1e-4, atol=3e-5
    )


@pytest.mark.parametrize("own_earlier", [0, 4])
@pytest.mark.parametrize("pieces", [(), (5,), (3, 0, 7)], ids=str)
def test_dense_prefill_sees_every_piece_and_its_own_past(
    pieces: tuple[int, ...], own_earlier: int
) -> None:
    torch.manual_seed(1)
    heads, group_size, head_dim, tokens = 2, 3, 64, 6
    visible = [dense(heads, piece, head_dim) for piece in pieces]
    own = dense(heads, own_earlier + tokens, head_dim)
    q = torch.randn(heads * group_size, tokens, head_dim)
    out, lse = attend_also(q, dense_prefill(q, own, scale=0.2), visible, scale=0.2)
    k = torch.cat([*(piece.k for piece in visible), own.k], dim=1).repeat_interleave(group_size, 0)
    v = torch.cat([*(piece.v for piece in visible), own.v], dim=1).repeat_interleave(group_size, 0)
    logits = (q @ k.transpose(1, 2)) * 0.2
    seen = k.shape[1] - tokens
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    logits[:, :, seen:].masked_fill_(future, -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, logits.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 9, 40])
@pytest.mark.parametrize("before", [0, 3, 14])
def test_dense_prefill_sees_no_further_back_than_its_window(before: int, window: int) -> None:
    torch.manual_seed(2)
    heads, group_size, head_dim, tokens = 2, 3, 64, 6
    own = dense(heads, before + tokens, head_dim)
    q = torch.randn(heads * group_size, tokens, head_dim)
    out, lse = dense_prefill(q, own, scale=0.2, window=window)
    k, v = own.k, own.v
    for token in range(tokens):
        last = k.shape[1] - tokens + token
        seen = slice(max(0, last - window + 1), last + 1)
        for q_head in range(heads * group_size):
            head = q_head // group_size
            keys, values = k[head, seen], v[head, seen]
            expected = reference.attend_rows(q[q_head, token], keys, values, scale=0.2)
            torch.testing.assert_close(out[q_head, token], expected, rtol=1e-4, atol=1e-5)
            norm = torch.logsumexp(keys @ q[q_head, token] * 0.2, dim=0)
            torch.testing.assert_close(lse[q_head, token], norm, rtol=1e-4, atol=1e-5)


def test_members_decoded_together_get_what_each_gets_alone() -> None:
    context = ragged([40, 0, 3], 64, seed=2)
    q = torch.randn(5, 6, 64)
    tails = [dense(3, tokens, 64) for tokens in (1, 2, 3, 64, 1)]
    together = ragged_decode(q, context, tails, scale=0.1)
    alone = [ragged_decode(q[i : i + 1], context, tails[i : i + 1], scale=0.1) for i in range(5)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_a_batch_over_several_contexts_gets_what_each_context_gets_alone() -> None:
    groups = tuple(
        DecodeGroup(ragged(lengths, 64, seed), tuple(dense(2, tokens, 64) for tokens in tails))
        for seed, (lengths, tails) in enumerate([([40, 0], (1, 5)), ([3, 7], (2,))])
    )
    q = torch.randn(3, 6, 64)
    together = ragged_decode_batch(q, DecodeBatch(groups), scale=0.1)
    pieces = zip(q.split([2, 1]), groups, strict=True)
    alone = [ragged_decode(rows, own.context, own.tails, scale=0.1) for rows, own in pieces]
    assert torch.equal(together, torch.cat(alone))


def test_the_order_of_rows_within_a_head_does_not_matter() -> None:
    context = ragged([31, 17], 64, seed=3)
    order = torch.cat([torch.randperm(31), 31 + torch.randperm(17)])
    shuffled = RaggedKV(context.k[order], context.v[order], context.start, context.length)
    q, tail = torch.randn(1, 4, 64), dense(2, 3, 64)
    torch.testing.assert_close(
        ragged_decode(q, context, [tail], scale=0.2),
        ragged_decode(q, shuffled, [tail], scale=0.2),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_truncated_context_never_reads_the_rows_behind_its_length() -> None:
    context = ragged([20, 30], 64, seed=4)
    short = context.truncated(torch.tensor([5, 0], dtype=torch.int32))
    context.k[5:] = torch.nan
    context.v[5:] = torch.nan
    out = ragged_decode(torch.randn(1, 2, 64), short, [dense(2, 1, 64)], scale=0.2)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bf16_error_is_at_most_twice_that_of_stock_attention(head_dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    context = ragged([600], head_dim, seed=seed, dtype=torch.bfloat16)
    tail = dense(1, 9, head_dim, torch.bfloat16)
    q = torch.randn(1, 4, head_dim, dtype=torch.bfloat16)
    k, v = torch.cat([context.k, tail.k[0]]), torch.cat([context.v, tail.v[0]])
    scale = head_dim**-0.5
    exact = torch.softmax((q[0].double() @ k.double().T) * scale, -1) @ v.double()
    stock = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.expand(4, -1, -1), v.expand(4, -1, -1), scale=scale
    )[:, 0]
    ours = ragged_decode(q, context, [tail], scale=scale)[0]
    stock_error = (stock.double() - exact).norm()
    assert (ours.double() - exact).norm() <= 2 * stock_error


def test_a_value_that_does_not_fit_is_refused_by_name() -> None:
    context = ragged([4, 4], 64, seed=6)
    with pytest.raises(ShapeError, match=r"^q: .*multiple of 2 heads of 64"):
        ragged_decode(torch.randn(1, 3, 64), context, [dense(2, 1, 64)], scale=1.0)
    with pytest.raises(ShapeError, match=r"^tails: "):
        ragged_decode(torch.randn(1, 2, 64), context, [dense(2, 0, 64)], scale=1.0)
    with pytest.raises(ShapeError, match=r"^tail tokens: "):
        ragged_prefill(torch.randn(2, 3, 64), context, dense(2, 2, 64), scale=1.0)
    with pytest.raises(ShapeError, match=r"^q sequences: found 2, expected 1"):
        ragged_decode(torch.randn(2, 2, 64), context, [dense(2, 1, 64)], scale=1.0)
    with pytest.raises(ShapeError, match=r"within 8 rows"):
        RaggedKV(context.k, context.v, context.start, context.length + 1)
    with pytest.raises(ShapeError, match=r"^length: "):
        context.truncated(torch.tensor([5, 1], dtype=torch.int32))


@pytest.mark.parametrize(
    "tail",
    [dense(3, 1, 64), dense(2, 1, 96), dense(2, 1, 64, torch.bfloat16)],
    ids=["heads", "width", "dtype"],
)
def test_a_tail_of_another_shape_is_refused_before_anything_is_read(tail: DenseKV) -> None:
    context = ragged([4, 4], 64, seed=6)
    with pytest.raises(ShapeError, match=r"^tail: "):
        ragged_decode(torch.randn(1, 2, 64), context, [tail], scale=1.0)
    with pytest.raises(ShapeError, match=r"^tail: "):
        ragged_prefill(torch.randn(2, 1, 64), context, tail, scale=1.0)


def test_queries_of_another_dtype_are_refused_before_anything_is_read() -> None:
    context = ragged([4, 4], 64, seed=6)
    q = torch.randn(1, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match=r"^q: .*bfloat16.*float32"):
        ragged_decode(q, context, [dense(2, 1, 64)], scale=1.0)
    with pytest.raises(ShapeError, match=r"^q: .*bfloat16.*float32"):
        ragged_prefill(q.transpose(0, 1), context, dense(2, 1, 64), scale=1.0)


def test_groups_that_are_not_alike_make_no_batch() -> None:
    two_heads, one_head, wider = (
        DecodeGroup(ragged(lengths, width, seed=1), (dense(len(lengths), 1, width),))
        for lengths, width in (([4, 4], 64), ([4], 64), ([4, 4], 96))
    )
    for groups in ((two_heads, one_head), (two_heads, wider), ()):
        with pytest.raises(ShapeError, match=r"^groups: "):
            DecodeBatch(groups)
