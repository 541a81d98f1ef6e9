"""The Triton decode equals the fp32 oracle; run by ``test_triton_decode`` in the interpreter."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels import reference
from kvkeep_kernels._triton import codes, decode, softmax, work_list
from kvkeep_kernels.attention import ragged_decode, ragged_decode_batch
from kvkeep_kernels.layout import (
    UNBOUNDED,
    CodeKind,
    DecodeBatch,
    DecodeGroup,
    DenseKV,
    RaggedKV,
)
from kvkeep_kernels.step_tables import StepGroup, StepShape, StepTables

from ...support.ragged_values import KINDS, dense, quantized, ragged
from ...support.triton_interpreter import bf16_products, mutated, poisoned_memory

__all__ = ["bf16_products"]

SCALE = 0.3


def batch_of(
    groups: Sequence[tuple[Sequence[int], Sequence[int]]],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[CodeKind | None] = (None,),
) -> DecodeBatch:
    """One group for each (lengths of its heads, tokens of its tails), in turn of these kinds."""
    made = []
    for seed, (lengths, tails) in enumerate(groups):
        context = quantized(ragged(lengths, head_dim, seed, dtype), kinds[seed % len(kinds)])
        own = tuple(dense(len(lengths), tokens, head_dim, dtype) for tokens in tails)
        made.append(DecodeGroup(context, own))
    return DecodeBatch(tuple(made))


def queries(batch: DecodeBatch, group_size: int) -> torch.Tensor:
    context = batch.groups[0].context
    heads = context.num_kv_heads * group_size
    return torch.randn(batch.num_sequences, heads, context.head_dim, dtype=context.dtype)


def oracle(q: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
    rows = torch.split(q, [len(group.tails) for group in batch.groups])
    return torch.cat(
        [
            reference.ragged_decode(own, group.context, group.tails, scale=SCALE)
            for own, group in zip(rows, batch.groups, strict=True)
        ]
    )


def check(batch: DecodeBatch, group_size: int) -> None:
    q = queries(batch, group_size)
    with poisoned_memory():
        out = ragged_decode_batch(q, batch, scale=SCALE)
    torch.testing.assert_close(out.float(), oracle(q, batch), rtol=1e-4, atol=1e-5)


@st.composite
def batches(draw: st.DrawFn) -> DecodeBatch:
    heads = draw(st.integers(1, 3))
    lengths = st.lists(st.sampled_from([0, 1, 2, 7, 33, 130]), min_size=heads, max_size=heads)
    tails = st.lists(st.sampled_from([1, 2, 5, 65]), min_size=1, max_size=3)
    groups = draw(st.lists(st.tuples(lengths, tails), min_size=1, max_size=2))
    alone = [(kind,) for kind in (None, None, *KINDS)]
    kinds = draw(st.sampled_from([*alone, ("int4", None), ("int8", "int4"), ("fp8", "int8")]))
    return batch_of(groups, draw(st.sampled_from([64, 96])), kinds=kinds)


@settings(max_examples=12)
@given(batch=batches(), group_size=st.integers(1, 8))
def test_a_batch_over_several_contexts_equals_the_oracle(
    batch: DecodeBatch, group_size: int
) -> None:
    check(batch, group_size)


@pytest.mark.parametrize("kind", [None, "int4", "fp8"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_wide_heads_equal_the_oracle(head_dim: int, kind: CodeKind | None) -> None:
    check(batch_of([((0, 33), (1, 2))], head_dim, kinds=(kind,)), group_size=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("groups", "group_size"),
    [
        pytest.param([((0, 0), (1,))], 1, id="empty-context"),
        pytest.param([((31, 32, 900), (31, 33))], 3, id="block±1-and-skew"),
        pytest.param([((40,), (1,) * 9)], 4, id="members-of-two-tiles"),
    ],
)
def test_an_edge_of_a_quantised_context_equals_the_oracle(
    groups: list[tuple[Sequence[int], Sequence[int]]], group_size: int, kind: CodeKind
) -> None:
    check(batch_of(groups, 64, kinds=(kind,)), group_size)


@pytest.mark.parametrize(
    ("groups", "group_size"),
    [
        pytest.param([((0, 0), (1,))], 1, id="empty-context"),
        pytest.param([((0, 1, 900), (1,))], 4, id="huge-skew"),
        pytest.param([((31, 32), (31, 32, 33))], 3, id="block±1"),
        pytest.param([((40,), (1,) * 9)], 4, id="members-of-two-tiles"),
        pytest.param([((3, 70), (2,)), ((0, 5), (1, 1)), ((64, 0), (7,))], 2, id="3-contexts"),
    ],
)
def test_an_edge_equals_the_oracle(
    groups: list[tuple[Sequence[int], Sequence[int]]], group_size: int
) -> None:
    check(batch_of(groups, 64), group_size)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_fp16_equals_the_oracle_to_its_digits(kind: CodeKind | None) -> None:
    batch = batch_of([((70, 5), (1, 3))], 64, torch.float16, (kind,))
    q = queries(batch, 2)
    out = ragged_decode_batch(q, batch, scale=SCALE)
    torch.testing.assert_close(out.float(), oracle(q, batch), rtol=5e-3, atol=2e-3)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bf16_error_is_at_most_twice_that_of_stock_attention(head_dim: int) -> None:
    context = ragged([300], head_dim, seed=5, dtype=torch.bfloat16)
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


def test_rows_may_be_views_of_wider_buffers_and_of_growing_tails() -> None:
    whole = ragged([20, 30], 192, seed=7)
    context = RaggedKV(whole.k[:, 64:128], whole.v[:, :64], whole.start, whole.length)
    layers = dense(4, 90, 64)
    # The last is a view that starts off every alignment.
    skewed = torch.randn(2 * 5 * 64 + 1)[1:].view(2, 5, 64)
    tails = (
        DenseKV(layers.k[:2, :3], layers.v[2:, :3]),
        DenseKV(layers.k.transpose(0, 1)[:2, :3], layers.v[:2, 4:7]),
        DenseKV(skewed, skewed * 2),
    )
    check(DecodeBatch((DecodeGroup(context, tails),)), group_size=3)


def test_rows_behind_a_run_or_a_tail_are_never_read() -> None:
    context = ragged([20, 30], 64, seed=4)
    short = context.truncated(torch.tensor([5, 0], dtype=torch.int32))
    buffer = dense(2, 8, 64)
    for rows in (context.k[5:], context.v[5:], buffer.k[:, 3:], buffer.v[:, 3:]):
        rows.fill_(torch.nan)
    tail = DenseKV(buffer.k[:, :3], buffer.v[:, :3])
    out = ragged_decode(torch.randn(1, 2, 64), short, [tail], scale=SCALE)
    assert torch.isfinite(out).all()


def test_tails_advanced_on_the_device_are_read_to_their_new_ends() -> None:
    context, buffer = ragged([9], 64, seed=8), dense(1, 6, 64)
    q = torch.randn(1, 2, 64)
    before = DenseKV(buffer.k[:, :5], buffer.v[:, :5])
    tables = work_list.tabulate(DecodeBatch((DecodeGroup(context, (before,)),)), 2)
    tables.tail_tokens.add_(1)
    out = decode.launch(q, tables, scale=SCALE)
    expected = reference.ragged_decode(q, context, [buffer], scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [None, "int4"])
def test_a_step_with_room_for_more_sequences_equals_the_oracle(kind: CodeKind | None) -> None:
    layers = [batch_of([((0, 70), (3, 2)), ((9, 40), (64,))], 64, kinds=(kind,)) for _ in range(2)]
    shape = StepShape((UNBOUNDED,) * 2, 4, 2, 1, 64, torch.float32, kind, tile_rows=16)
    buffer = torch.zeros(shape.numbers, dtype=torch.int64)
    tables = StepTables(shape, buffer)
    groups, new = [], torch.zeros(2, 2, 4, 2, 64)
    place = 0
    for group in range(2):
        buffers = []
        for member in range(len(layers[0].groups[group].tails)):
            own = [batch.groups[group].tails[member] for batch in layers]
            # The last row is the new one, which the step writes itself.
            buffers.append(torch.full((2, 2, 2, own[0].tokens + 3, 64), torch.nan))
            for layer, tail in enumerate(own):
                for which, rows in enumerate((tail.k, tail.v)):
                    buffers[-1][layer, which, :, : tail.tokens - 1] = rows[:, :-1]
                    new[layer, which, place] = rows[:, -1]
            place += 1
        contexts = [batch.groups[group].context for batch in layers]
        groups.append(StepGroup(contexts, tuple(buffers)))
    buffer.copy_(torch.tensor(tables.describe(groups)))
    tables.set_tail_tokens(torch.tensor([3, 2, 64, 1]))
    for layer, batch in enumerate(layers):
        q = torch.randn(4, 2, 64)
        with poisoned_memory():
            tables.append(layer, new[layer, 0], new[layer, 1])
            out = tables.attend(layer, q, scale=SCALE)
        torch.testing.assert_close(out[:3], oracle(q[:3], batch), rtol=1e-4, atol=1e-5)
        assert torch.isfinite(out).all()


@settings(max_examples=12)
@given(
    groups=st.lists(
        st.tuples(
            st.lists(st.sampled_from([0, 1, 63, 64, 65, 5_000, 1_000_000]), min_size=2, max_size=2),
            st.lists(st.integers(1, 3_000), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_the_work_list_covers_every_row_once_however_lengths_differ(
    groups: list[tuple[list[int], list[int]]],
) -> None:
    made = []
    for lengths, tails in groups:
        rows = torch.zeros(1, 64).expand(sum(lengths), 64)
        length = torch.tensor(lengths, dtype=torch.int32)
        context = RaggedKV(rows, rows, torch.zeros(2, dtype=torch.int32), length)
        own = [torch.zeros(1, 1, 64).expand(2, tokens, 64) for tokens in tails]
        made.append(DecodeGroup(context, tuple(DenseKV(kv, kv) for kv in own)))
    tables = work_list.tabulate(DecodeBatch(tuple(made)), 1)
    with poisoned_memory():
        work = work_list.plan(tables, 4, 64)
    # Up to three members share one tile, so a context's rows are read once, not once for each.
    runs = [length for lengths, _ in groups for length in lengths]
    runs += [tokens for _, tails in groups for tokens in tails for _ in range(2)]
    run, first, rows = work.items.tolist()
    assert work.indptr[-1] <= work.num_slots
    for index, expected in enumerate(runs):
        items = range(work.indptr[index], work.indptr[index + 1])
        covered = 0
        for item in items:
            assert (run[item], first[item]) == (index, covered)
            assert rows[item] > 0
            covered += rows[item]
        assert covered == expected
    assert not any(rows[work.indptr[-1] :])


MUTANTS = {
    "dropped-scale": (softmax, "products * scale_log2", "products * 1.44"),
    "natural-base": (softmax, "tl.exp2(logits - ", "tl.exp(logits - "),
    "mask-ignored": (softmax, "tl.where(is_seen, logits", "tl.where(key[None, :] >= 0, logits"),
    "state-not-decayed": (softmax, "acc = acc * decay[:, None]", "acc = acc * 1.0"),
    "merge-not-decayed": (decode, "acc = acc * decay +", "acc = acc +"),
    "merge-without-masses": (decode, "tl.sum(masses * weights", "tl.sum(weights"),
    "merge-unweighted": (decode, "tl.sum(outs * weights[:, None]", "tl.sum(outs"),
    "swapped-heads": (decode, "(run % HEADS) * GROUP", "(HEADS - 1 - run % HEADS) * GROUP"),
    "swapped-group-rows": (decode, "row = group_row if", "row = GROUP - 1 - group_row if"),
    "tail-off-by-one": (work_list, "other=0)\n    # Every", "other=0) - is_tail\n    # Every"),
    "start-ignored": (work_list, "+ start * k_stride", "+ 0 * start * k_stride"),
    "members-confused": (work_list, "tl.load(tile + 6))", "tl.load(tile + 6) * 0)"),
}


QUANTISED_MUTANTS = {
    "nibbles-swapped": (codes, "(packed & 0xF, packed >> 4)", "(packed >> 4, packed & 0xF)"),
    "k-scale-dropped": (codes, "products * tl.abs(scales)[None, :]", "products"),
    "k-zero-dropped": (codes, "products += q_sum[:, None] * zeros", "zeros"),
    "v-scale-dropped": (codes, "codes * scales[:, None]", "codes"),
    "v-zero-dropped": (codes, "numbers += zeros", "zeros"),
    "rows-behind-seen": (codes, "is_seen = is_row[None, :]", "is_seen = row[None, :] >= 0"),
    "mean-dropped": (decode, "mean = mean_products", "mean = 0 * mean_products"),
    "mean-for-every-row": (codes, "scales[None, :] > 0.0", "scales[None, :] != 0.0"),
    "sign-kept": (codes, "tl.abs(scales)", "scales"),
    "mean-of-another-head": (decode, "to(half) + head * HEAD_DIM", "to(half)"),
    "scales-of-row-0": (decode, "tl.load(starts + head) + first_row", "first_row"),
    "scales-of-another-tile": (decode, "scales + tile * SCALE", "scales + 0 * SCALE"),
}


FLOAT_MUTANTS = {
    "sign-lost": (codes, "& ~0x4000", "& 0x3FFF"),
    "wrong-exponent": (codes, "* 256.0", "* 128.0"),
    "no-fraction": (codes, "<< 8) >> 1)", "& 0xF8) << 7)"),
    "v-scale-dropped": (codes, "codes * scales[:, None]", "codes"),
    "scales-swapped": (decode, "tl.load(halves + 2)", "tl.load(halves)"),
}


@pytest.mark.parametrize("mutant", FLOAT_MUTANTS)
def test_a_mutated_kernel_of_fp8_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mutant_of_codes(FLOAT_MUTANTS[mutant], "fp8", tmp_path, monkeypatch)


@pytest.mark.parametrize("mutant", QUANTISED_MUTANTS)
def test_a_mutated_kernel_of_quantised_contexts_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mutant_of_codes(QUANTISED_MUTANTS[mutant], "int4", tmp_path, monkeypatch)


def check_mutant_of_codes(
    mutant: tuple[ModuleType, str, str],
    kind: CodeKind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, found, planted = mutant
    broken = mutated(module, found, planted, tmp_path)
    for name in ("fold_codes",) if module is codes else ("attend_items",):
        monkeypatch.setattr(decode, name, getattr(broken, name))
    batch = batch_of([((5, 100), (3,)), ((4, 7), (2,))], 64, kinds=(kind,))
    with pytest.raises(AssertionError):
        check(batch, group_size=2)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_kernel_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, found, planted = MUTANTS[mutant]
    broken = mutated(module, found, planted, tmp_path)
    for name in ("fold_run",) if module is softmax else ("attend_items", "merge_items"):
        if module is not work_list:
            monkeypatch.setattr(decode, name, getattr(broken, name))
    if module is work_list:
        monkeypatch.setattr(decode, "plan", broken.plan)
    batch = batch_of([((5, 600), (3, 2)), ((4, 0), (2,))], 64)
    with pytest.raises(AssertionError):
        check(batch, group_size=2)
