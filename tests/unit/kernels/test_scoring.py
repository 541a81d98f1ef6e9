"""KVzip's score equals the whole-matrix oracle, however its rows are sliced."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels import reference, scoring
from kvkeep_kernels.layout import ShapeError


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
