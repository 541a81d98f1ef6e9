"""KVzip's score and the column reduction equal their oracles, however rows are sliced."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels import reference, scoring
from kvkeep_kernels.layout import ShapeError

from .column_cases import column_case, naive_plus_score, plus_factors

OPS = ("max", "logsum")


def score(q: torch.Tensor, prefix: torch.Tensor, chunk: torch.Tensor, repeat: torch.Tensor):
    lse = scoring.row_lse(q, prefix, chunk, repeat, scale=0.25)
    return scoring.chunk_max_attention(q, chunk, lse, scale=0.25)


@settings(max_examples=40)
@given(
    heads=st.integers(1, 3),
    group_size=st.integers(1, 5),
    sizes=st.tuples(st.integers(0, 9), st.sampled_from([1, 3, 20]), st.sampled_from([1, 2, 33])),
    seed=st.integers(0, 1000),
)
def test_the_score_equals_the_oracle(
    heads: int, group_size: int, sizes: tuple[int, int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    prefix, chunk, repeat = (torch.randn(heads, size, 64) for size in sizes)
    q = torch.randn(heads * group_size, sizes[2], 64)
    expected = reference.chunk_max_attention(q, prefix, chunk, repeat, scale=0.25)
    torch.testing.assert_close(score(q, prefix, chunk, repeat), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tile_rows", [1, 7, 64])
def test_slices_and_tiles_change_nothing_but_rounding(
    tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    prefix, chunk, repeat = (torch.randn(2, size, 64) for size in (5, 40, 31))
    q = torch.randn(6, 31, 64)
    expected = reference.chunk_max_attention(q, prefix, chunk, repeat, scale=0.25)
    monkeypatch.setattr(scoring, "TILE_ROWS", tile_rows)
    running = torch.zeros(2, 40)
    for first in range(0, 31, 10):
        last = min(first + 10, 31)
        piece = score(q[:, first:last], prefix, chunk, repeat[:, :last])
        running = torch.maximum(running, piece)
    torch.testing.assert_close(running, expected, rtol=1e-4, atol=1e-6)


def test_scores_of_bf16_keys_do_not_tie_in_bf16() -> None:
    torch.manual_seed(8)
    prefix, chunk, repeat = (torch.randn(1, n, 64, dtype=torch.bfloat16) for n in (4, 2000, 40))
    found = score(torch.randn(3, 40, 64, dtype=torch.bfloat16), prefix, chunk, repeat)
    assert found.dtype == torch.float32
    assert found.unique().numel() > 1900


def test_the_prefix_takes_part_in_the_softmax() -> None:
    torch.manual_seed(9)
    prefix, chunk, repeat = (torch.randn(1, size, 64) for size in (6, 10, 8))
    q = torch.randn(2, 8, 64)
    without = score(q, prefix[:, :0], chunk, repeat)
    assert (score(q, prefix, chunk, repeat) < without).all()


def test_a_log_sum_exp_of_other_rows_is_refused() -> None:
    chunk = torch.randn(1, 4, 64)
    with pytest.raises(ShapeError, match=r"^lse: "):
        scoring.chunk_max_attention(torch.randn(2, 3, 64), chunk, torch.zeros(2, 4), scale=1.0)


@settings(max_examples=20)
@given(
    group_size=st.integers(1, 4),
    sizes=st.tuples(st.sampled_from([1, 3, 33]), st.sampled_from([1, 20, 33])),
    earlier=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_rows_late_in_the_repeat_input_see_all_before_them(
    group_size: int, sizes: tuple[int, int], earlier: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rows, chunk = sizes
    prefix, keys, repeat = (torch.randn(2, size, 64) for size in (3, chunk, earlier + rows))
    q = torch.randn(2 * group_size, rows, 64)
    found = scoring.row_lse(q, prefix, keys, repeat, scale=0.125)
    torch.testing.assert_close(found, reference.row_lse(q, prefix, keys, repeat, scale=0.125))


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=30)
@given(
    heads=st.integers(1, 3),
    group_size=st.integers(1, 4),
    rows=st.sampled_from([1, 2, 17, 30]),
    columns=st.sampled_from([1, 5, 30]),
    window=st.sampled_from([None, 0, 1, 7, 29]),
    documents=st.integers(0, 3),
    has_factors=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_column_reduction_equals_the_oracle(
    op: scoring.Reduction,
    heads: int,
    group_size: int,
    rows: int,
    columns: int,
    window: int | None,
    documents: int,
    has_factors: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    bounds = {"window": window, "documents": documents}
    case = column_case(heads, group_size, rows, columns, has_factors=has_factors, **bounds)
    torch.testing.assert_close(case.reduced(op), case.expected(op), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tile_rows", [1, 7, 64])
def test_tiles_of_the_column_reduction_change_nothing_but_rounding(
    op: scoring.Reduction, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(11)
    monkeypatch.setattr(scoring, "TILE_ROWS", tile_rows)
    case = column_case(2, 3, 31, 31, window=4, documents=2)
    torch.testing.assert_close(case.reduced(op), case.expected(op), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_every_wrong_column_reduction_is_told_apart(op: scoring.Reduction) -> None:
    torch.manual_seed(12)
    case = column_case(2, 2, 40, 40, window=5, documents=2)
    found = case.reduced(op)
    torch.testing.assert_close(found, case.expected(op), rtol=1e-4, atol=1e-4)
    for name, wrong in case.mutants(op).items():
        assert not torch.allclose(found, wrong, rtol=1e-2, atol=1e-2), name


@settings(max_examples=15)
@given(
    heads=st.integers(1, 2),
    group_size=st.integers(1, 4),
    sizes=st.tuples(st.integers(0, 5), st.sampled_from([1, 20]), st.sampled_from([1, 33])),
    seed=st.integers(0, 1000),
)
def test_the_score_of_kvzip_plus_equals_a_naive_one_in_fp64(
    heads: int, group_size: int, sizes: tuple[int, int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    keys = tuple(torch.randn(heads, size, 64) for size in sizes)
    q = torch.randn(heads * group_size, sizes[2], 64)
    naive, plus = plus_factors(q, torch.randn(heads, sizes[1], 64), hidden_size=96)
    lse = scoring.row_lse(q, *keys, scale=0.25)
    found = scoring.chunk_max_attention(q, keys[1], lse, scale=0.25, plus=plus)
    expected = naive_plus_score(q, keys, naive, 0.25)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_column_whose_value_is_zero_has_no_score_in_kvzip_plus() -> None:
    torch.manual_seed(14)
    case = column_case(1, 2, 8, 5)
    plus = scoring.PlusFactors(torch.tensor([[1.0, 0, 2, 1, 1]] * 2), torch.ones(8))
    found = scoring.chunk_max_attention(case.q, case.k, case.lse, scale=case.scale, plus=plus)
    assert (found == 0).tolist() == [[False, True, False, False, False]]


def test_kvzips_score_is_the_unbounded_maximum() -> None:
    torch.manual_seed(13)
    case = column_case(2, 3, 20, 30)
    found = scoring.chunk_max_attention(case.q, case.k, case.lse, scale=case.scale)
    assert torch.equal(found, case.reduced("max").exp())


def test_a_column_that_nobody_sees_has_no_logarithm_but_no_nan_either() -> None:
    case = column_case(1, 2, 8, 8, window=3)
    for op in OPS:
        found = case.reduced(op)
        assert torch.isneginf(found[:, 5:]).all()
        assert torch.isfinite(found[:, :5]).all()


def test_a_sum_too_small_for_fp32_keeps_its_logarithm() -> None:
    case = column_case(1, 1, 4, 4)
    far = type(case)(case.q, case.k, case.lse + 300.0, None, None, case.scale)
    torch.testing.assert_close(far.reduced("logsum"), case.reduced("logsum") - 300.0)


@pytest.mark.parametrize("op", OPS)
def test_a_key_that_is_not_a_number_never_gets_a_score(op: scoring.Reduction) -> None:
    case = column_case(2, 2, 8, 8)
    case.k[1, 3, 5] = torch.nan
    broken = torch.zeros(2, 8, dtype=torch.bool)
    broken[1, 3] = True
    assert torch.equal(case.reduced(op).isnan(), broken)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"first_query": torch.zeros(3, dtype=torch.int32)}, "first_query"),
        ({"last_query": torch.zeros(4)}, "last_query"),
        ({"k": torch.zeros(1, 4, 64, dtype=torch.bfloat16)}, "q"),
        ({"k": torch.zeros(1, 4, 32)}, "q"),
        ({"lse": torch.zeros(2, 4)}, "lse"),
        ({"op": "mean"}, "op"),
        ({"log_factor": torch.zeros(1, 4)}, "log_factor"),
    ],
    ids=["bound length", "bound dtype", "key dtype", "key width", "lse rows", "operation", "heads"],
)
def test_inputs_that_do_not_fit_are_refused_by_name(changed: dict[str, object], name: str) -> None:
    inputs = {
        "q": torch.zeros(2, 3, 64),
        "k": torch.zeros(1, 4, 64),
        "lse": torch.zeros(2, 3),
        "first_query": None,
        "last_query": None,
        "op": "max",
        **changed,
    }
    with pytest.raises(ShapeError, match=rf"^{name}: "):
        scoring.column_reduce(**inputs, scale=1.0)


def test_hidden_norms_of_other_rows_are_refused() -> None:
    case = column_case(1, 2, 8, 5)
    plus = scoring.PlusFactors(torch.ones(2, 5), torch.ones(7))
    with pytest.raises(ShapeError, match=r"^hidden_norm: "):
        scoring.chunk_max_attention(case.q, case.k, case.lse, scale=case.scale, plus=plus)


def test_keys_of_another_number_of_heads_are_refused() -> None:
    q, keys = torch.zeros(6, 2, 64), torch.zeros(2, 4, 64)
    with pytest.raises(ShapeError, match=r"^keys heads: "):
        scoring.row_lse(q, torch.zeros(3, 4, 64), keys, keys, scale=1.0)
