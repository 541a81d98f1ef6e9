"""Triton's scoring equals the oracles; run by ``test_triton_scoring`` in the interpreter."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels import reference
from kvkeep_kernels._triton import scoring as kernels
from kvkeep_kernels.backend import uses_triton
from kvkeep_kernels.scoring import Reduction, chunk_max_attention, column_reduce, row_lse

from ...support.triton_interpreter import bf16_products, mutated, poisoned_memory
from .column_cases import ColumnCase, column_case, naive_plus_score, plus_factors

__all__ = ["bf16_products"]

OPS = ("max", "logsum")
HEAD_DIMS = (64, 96, 128, 256)
SCALE = 0.125


def keys_of(heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys as an engine has them: a view into a cache of more tokens."""
    return torch.randn(heads, tokens + 2, head_dim, dtype=dtype)[:, 1:-1]


def check_row_lse(
    heads: int,
    group_size: int,
    sizes: tuple[int, int, int, int],
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> None:
    prefix, chunk, earlier, rows = sizes
    keys = [keys_of(heads, n, head_dim, dtype) for n in (prefix, chunk, earlier + rows)]
    q = torch.randn(rows, heads * group_size, head_dim, dtype=dtype).transpose(0, 1)
    with poisoned_memory():
        found = row_lse(q, *keys, scale=SCALE)
    torch.testing.assert_close(found, reference.row_lse(q, *keys, scale=SCALE))


def check_columns(case: ColumnCase, op: Reduction) -> None:
    with poisoned_memory():
        found = case.reduced(op)
    torch.testing.assert_close(found, case.expected(op), rtol=1e-4, atol=1e-4)


def test_triton_serves_these_tests() -> None:
    assert uses_triton(torch.device("cpu"))


@settings(max_examples=8)
@given(
    heads=st.integers(1, 2),
    group_size=st.integers(1, 8),
    sizes=st.tuples(
        st.sampled_from([0, 1, 40]),
        st.sampled_from([1, 17, 40]),
        st.sampled_from([0, 3, 33]),
        st.sampled_from([1, 2, 31]),
    ),
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_the_row_log_sum_exp_equals_the_oracle(
    heads: int, group_size: int, sizes: tuple[int, int, int, int], head_dim: int
) -> None:
    check_row_lse(heads, group_size, sizes, head_dim)


@settings(max_examples=14)
@given(
    op=st.sampled_from(OPS),
    heads=st.integers(1, 2),
    group_size=st.integers(1, 8),
    rows=st.sampled_from([1, 15, 16, 17, 50]),
    columns=st.sampled_from([1, 31, 33, 70]),
    window=st.sampled_from([None, 0, 1, 31, 69]),
    documents=st.integers(0, 3),
    has_factors=st.booleans(),
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_the_column_reduction_equals_the_oracle(
    op: Reduction,
    heads: int,
    group_size: int,
    rows: int,
    columns: int,
    window: int | None,
    documents: int,
    has_factors: bool,
    head_dim: int,
) -> None:
    bounds = {"window": window, "documents": documents, "has_factors": has_factors}
    check_columns(column_case(heads, group_size, rows, columns, head_dim=head_dim, **bounds), op)


def test_the_two_passes_make_kvzips_score() -> None:
    prefix, chunk, repeat = (torch.randn(2, n, 64) for n in (5, 40, 35))
    q = torch.randn(6, 35, 64)
    with poisoned_memory():
        lse = row_lse(q, prefix, chunk, repeat, scale=SCALE)
        found = chunk_max_attention(q, chunk, lse, scale=SCALE)
    expected = reference.chunk_max_attention(q, prefix, chunk, repeat, scale=SCALE)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_score_of_kvzip_plus_equals_a_naive_one_in_fp64() -> None:
    keys = tuple(torch.randn(2, n, 64) for n in (5, 40, 35))
    q = torch.randn(6, 35, 64)
    naive, plus = plus_factors(q, torch.randn(2, 40, 64), hidden_size=96)
    with poisoned_memory():
        lse = row_lse(q, *keys, scale=SCALE)
        found = chunk_max_attention(q, keys[1], lse, scale=SCALE, plus=plus)
    expected = naive_plus_score(q, keys, naive, SCALE)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_inputs_are_summed_in_fp32(dtype: torch.dtype) -> None:
    check_row_lse(1, 3, (5, 40, 3, 20), dtype=dtype)
    for op in OPS:
        check_columns(column_case(1, 3, 70, 70, window=4, dtype=dtype), op)


def test_a_column_that_nobody_sees_has_no_logarithm_but_no_nan_either() -> None:
    case = column_case(1, 2, 40, 40, window=9)
    for op in OPS:
        found = case.reduced(op)
        assert torch.isneginf(found[:, 31:]).all()
        assert torch.isfinite(found[:, :31]).all()


def test_a_sum_too_small_for_fp32_keeps_its_logarithm() -> None:
    case = column_case(1, 1, 4, 4)
    far = ColumnCase(case.q, case.k, case.lse + 300.0, None, None, case.scale)
    check_columns(far, "logsum")


# The interpreter takes maxima with numpy, which warns where nothing but NaN is left.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("op", OPS)
def test_a_key_that_is_not_a_number_never_gets_a_score(op: Reduction) -> None:
    case = column_case(2, 2, 40, 40)
    case.k[1, 35, 5] = torch.nan
    broken = torch.zeros(2, 40, dtype=torch.bool)
    broken[1, 35] = True
    assert torch.equal(case.reduced(op).isnan(), broken)


@pytest.mark.parametrize("op", OPS)
def test_bounds_may_be_any_integers_and_lie_outside_the_rows(op: Reduction) -> None:
    case = column_case(1, 2, 20, 6)
    first = torch.tensor([-5, 0, 3, 19, 20, 99], dtype=torch.int32)
    last = torch.tensor([2, 99, 3, 20, 25, -1])
    found = column_reduce(case.q, case.k, case.lse, first, last, op, scale=case.scale)
    expected = case.expected(op, first_query=first, last_query=last)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


COLUMN_MUTANTS = {
    "no-lse": ("* scale - norm[None, :]", "* scale"),
    "no-scale": ('tl.dot(keys, queries, input_precision="ieee") * scale', "tl.dot(keys, queries)"),
    "first-query-unseen": ("(row[None, :] - first", "(row[None, :] - 1 - first"),
    "last-query-seen": ("< span[:, None]", "<= span[:, None]"),
    "first-tile-skipped": ("tl.min(first, axis=0)", "tl.max(first, axis=0)"),
    "last-tile-skipped": ("last_row = tl.max(last", "last_row = tl.min(last"),
    "one-member-only": ("q_head += is_last.to(tl.int64)", "q_head += 0"),
    "heads-swapped": ("k + head * k_head_stride", "k + (1 - head) * k_head_stride"),
    "factor-of-another-head": ("log_factor + q_head * columns", "log_factor + head * columns"),
    "factor-squared": ("x += factor[:, None]", "x += 2 * factor[:, None]"),
    "rows-beyond-the-end": ('mask=is_row, other=float("inf")', "mask=is_row, other=0.0"),
}
LOGSUM_MUTANTS = {
    **COLUMN_MUTANTS,
    "sum-not-rescaled": ("mass = mass * tl.exp(peak - reference)", "mass = mass * 1.0"),
    "sum-over-the-group": (
        "if tile == end_tile - 1:",
        "if q_head == head * group_size + group_size - 1 and tile == end_tile - 1:",
    ),
    "no-group-maximum": ("tl.maximum(group_peak, summed,", "tl.maximum(summed, summed,"),
}


@pytest.mark.parametrize(
    ("op", "mutant"),
    [*(("max", name) for name in COLUMN_MUTANTS), *(("logsum", name) for name in LOGSUM_MUTANTS)],
)
def test_a_mutated_column_reduction_is_caught(
    op: Reduction, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    broken = mutated(kernels, *LOGSUM_MUTANTS[mutant], tmp_path)
    monkeypatch.setattr(kernels, "column_reduce", broken.column_reduce)
    cases = [
        column_case(2, 2, 39, 40, window=3, documents=2),
        column_case(2, 2, 39, 40, has_factors=True),
    ]
    found = torch.cat([case.reduced(op) for case in cases])
    expected = torch.cat([case.expected(op) for case in cases])
    assert not torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


ROW_MUTANTS = {
    "prefix-forgotten": ("nothing + prefix_tokens", "nothing"),
    "chunk-twice": ("k_prefix + head * prefix_head_stride", "k_chunk + head * chunk_head_stride"),
    "future-seen": ("- rows + row + 1, repeat", "- rows + row + 2, repeat"),
    "own-row-unseen": ("- rows + row + 1, repeat", "- rows + row, repeat"),
    "earlier-forgotten": ("tl.minimum(repeat_tokens - rows + row + 1", "tl.minimum(row + 1"),
    "sum-not-rescaled": ("mass = mass * tl.exp(peak - new_peak)", "mass = mass * 1.0"),
}


@pytest.mark.parametrize("mutant", ROW_MUTANTS)
def test_a_mutated_row_log_sum_exp_is_caught(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = mutated(kernels, *ROW_MUTANTS[mutant], tmp_path)
    monkeypatch.setattr(kernels, "row_lse", broken.row_lse)
    with pytest.raises(AssertionError):
        check_row_lse(2, 2, (5, 40, 3, 20))
