"""The Triton prefill equals the fp32 oracle; run by ``test_triton_prefill`` in the interpreter."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels import reference
from kvkeep_kernels._triton import prefill, softmax
from kvkeep_kernels.attention import ragged_prefill
from kvkeep_kernels.layout import CodeKind, DenseKV, RaggedKV

from ...support.ragged_values import KINDS, dense, quantized, ragged
from ...support.triton_interpreter import bf16_products, mutated, poisoned_memory

__all__ = ["bf16_products"]

SCALE = 0.3


def check(
    lengths: Sequence[int],
    *,
    tokens: int,
    earlier: int,
    group_size: int,
    head_dim: int,
    kind: CodeKind | None = None,
) -> None:
    context = quantized(ragged(lengths, head_dim, seed=1), kind)
    tail = dense(len(lengths), earlier + tokens, head_dim)
    q = torch.randn(len(lengths) * group_size, tokens, head_dim)
    with poisoned_memory():
        out = ragged_prefill(q, context, tail, scale=SCALE)
    expected = reference.ragged_prefill(q, context, tail, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=14)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 7, 33, 130]), min_size=1, max_size=3),
    tokens=st.integers(1, 9),
    earlier=st.sampled_from([0, 1, 5, 40]),
    group_size=st.integers(1, 8),
    head_dim=st.sampled_from([64, 96]),
    kind=st.sampled_from([None, *KINDS]),
)
def test_a_question_equals_the_oracle(
    lengths: list[int],
    tokens: int,
    earlier: int,
    group_size: int,
    head_dim: int,
    kind: CodeKind | None,
) -> None:
    check(
        lengths,
        tokens=tokens,
        earlier=earlier,
        group_size=group_size,
        head_dim=head_dim,
        kind=kind,
    )


@pytest.mark.parametrize(
    ("lengths", "tokens", "earlier"),
    [
        pytest.param((0, 0), 1, 0, id="empty-context-one-token"),
        pytest.param((0, 1, 900), 2, 3, id="huge-skew"),
        pytest.param((31, 64), 33, 31, id="several-tiles-and-key-blocks"),
    ],
)
def test_an_edge_equals_the_oracle(lengths: Sequence[int], tokens: int, earlier: int) -> None:
    check(lengths, tokens=tokens, earlier=earlier, group_size=3, head_dim=64)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_a_quantised_head_equal_the_oracle(kind: CodeKind) -> None:
    check((33, 900, 0), tokens=33, earlier=7, group_size=3, head_dim=64, kind=kind)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_wide_heads_equal_the_oracle(head_dim: int) -> None:
    check((0, 33), tokens=3, earlier=1, group_size=2, head_dim=head_dim)


def test_a_head_of_many_rows_is_shared_between_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    context, tail = ragged([900], 64, seed=2), dense(1, 2, 64)
    q = torch.randn(1, 2, 64)
    grids = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return stock[grid]

    stock = prefill.attend_shares
    monkeypatch.setattr(prefill, "attend_shares", Recorded())
    out = ragged_prefill(q, context, tail, scale=SCALE)
    assert grids[0][2] > 1
    expected = reference.ragged_prefill(q, context, tail, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("bf16_products")
def test_bf16_error_is_at_most_twice_that_of_stock_attention() -> None:
    context = ragged([300], 64, seed=5, dtype=torch.bfloat16)
    tail = dense(1, 9, 64, torch.bfloat16)
    q = torch.randn(4, 9, 64, dtype=torch.bfloat16)
    k, v = torch.cat([context.k, tail.k[0]]), torch.cat([context.v, tail.v[0]])
    is_seen = torch.ones(9, 309, dtype=torch.bool).tril(300)
    logits = (q.double() @ k.double().T) * 0.125
    exact = torch.softmax(logits.masked_fill(~is_seen, -torch.inf), -1) @ v.double()
    stock = torch.nn.functional.scaled_dot_product_attention(
        q, k.expand(4, -1, -1), v.expand(4, -1, -1), attn_mask=is_seen, scale=0.125
    )
    ours = ragged_prefill(q, context, tail, scale=0.125)
    stock_error = (stock.double() - exact).norm()
    assert (ours.double() - exact).norm() <= 2 * stock_error


def test_rows_behind_a_run_are_never_read_and_views_are_welcome() -> None:
    context, buffer = ragged([20, 30], 64, seed=4), dense(2, 9, 64)
    short = context.truncated(torch.tensor([5, 0], dtype=torch.int32))
    for rows in (context.k[5:], context.v[5:], buffer.k[:, 4:], buffer.v[:, 4:]):
        rows.fill_(torch.nan)
    tail = DenseKV(buffer.k[:, :4], buffer.v[:, :4])
    # As the engine hands it in: [tokens, heads, d] turned around.
    q = torch.randn(3, 4, 64).transpose(0, 1)
    out = ragged_prefill(q, short, tail, scale=SCALE)
    expected = reference.ragged_prefill(q, short, tail, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_context_may_be_columns_of_a_wider_buffer() -> None:
    whole = ragged([20, 30], 192, seed=7)
    context = RaggedKV(whole.k[:, 64:128], whole.v[:, :64], whole.start, whole.length)
    q, tail = torch.randn(4, 2, 64), dense(2, 3, 64)
    out = ragged_prefill(q, context, tail, scale=SCALE)
    expected = reference.ragged_prefill(q, context, tail, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


MUTANTS = {
    "dropped-scale": (softmax, "products * scale_log2", "products * 1.44"),
    "causal-mask-ignored": (softmax, "if IS_CAUSAL:", "if False:"),
    "state-not-decayed": (softmax, "acc = acc * decay[:, None]", "acc = acc * 1.0"),
    "future-seen": (
        prefill,
        "seen = tail_tokens - tokens + token + 1",
        "seen = tail_tokens + token",
    ),
    "own-row-unseen": (prefill, "tokens + token + 1", "tokens + token"),
    "swapped-heads": (prefill, "q_row = (head * GROUP", "q_row = ((1 - head) * GROUP"),
    "share-off-by-one": (prefill, "rows * share // shares", "rows * share // shares + 1"),
    "tail-forgotten-rows": (prefill, "tokens - 1)", "tokens - 2)"),
    "merge-not-decayed": (prefill, "acc = acc * decay[:, None] +", "acc = acc +"),
    "merge-unweighted": (prefill, "outs * weight[:, None]", "outs"),
    "start-ignored": (prefill, "at = tl.load(start + head) + first", "at = first"),
}


QUANTISED_MUTANTS = {
    "mean-dropped": ("mean = mean_products", "mean = 0 * mean_products"),
    "mean-of-another-head": ("k_mean + head * HEAD_DIM", "k_mean"),
    "scales-of-row-0": ("k_scale + at,", "k_scale,"),
}


@pytest.mark.parametrize("mutant", QUANTISED_MUTANTS)
def test_a_mutated_kernel_of_quantised_contexts_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = mutated(prefill, *QUANTISED_MUTANTS[mutant], tmp_path)
    monkeypatch.setattr(prefill, "attend_shares", broken.attend_shares)
    with pytest.raises(AssertionError):
        check((20, 90), tokens=4, earlier=2, group_size=2, head_dim=64, kind="int4")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_kernel_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, found, planted = MUTANTS[mutant]
    broken = mutated(module, found, planted, tmp_path)
    for name in ("fold_run",) if module is softmax else ("attend_shares", "merge_shares"):
        monkeypatch.setattr(prefill, name, getattr(broken, name))
    with pytest.raises(AssertionError):
        check((90, 400), tokens=4, earlier=2, group_size=2, head_dim=64)
