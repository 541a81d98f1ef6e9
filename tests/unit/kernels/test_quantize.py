"""Quantised rows: bounded errors, exact bytes, and what is refused."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_kernels import attention, reference
from kvkeep_kernels.attention import ragged_decode, ragged_decode_batch, ragged_prefill
from kvkeep_kernels.layout import (
    CodeKind,
    DecodeBatch,
    DecodeGroup,
    OutOfRange,
    QuantizedKV,
    RaggedKV,
    ShapeError,
)
from kvkeep_kernels.quantize import channel_mean, quantize_kv

from ...support.ragged_values import KINDS, dense, quantized, ragged

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS: dict[CodeKind, int] = {"int8": 255, "int4": 15}


def one_head(k: torch.Tensor, v: torch.Tensor | None = None) -> RaggedKV:
    length = torch.tensor([len(k)], dtype=torch.int32)
    return RaggedKV(k, k.clone() if v is None else v, torch.zeros_like(length), length)


def no_mean(kind: CodeKind, head_dim: int) -> torch.Tensor | None:
    return torch.zeros(1, head_dim, dtype=torch.float16) if kind == "int4" else None


def check_errors(rows: torch.Tensor, kind: CodeKind) -> None:
    if kind == "fp8":
        check_float_errors(rows)
    else:
        check_integer_errors(rows, kind)


def check_float_errors(rows: torch.Tensor) -> None:
    """Every number comes back to a sixteenth of itself, or to half the smallest code."""
    found = quantize_kv(one_head(rows), "fp8")
    back, _ = reference.head_rows(found, 0)
    exact, scale = rows.double(), found.k_scale.double()[:, None]
    error = (back.double() - exact).abs()
    rounding = 2.0**-20 * exact.abs()
    assert (error <= torch.maximum(exact.abs() / 16, scale * 2.0**-10) + rounding).all()
    # The scale is no larger than float16 makes it, and nothing overflows a model's own dtype.
    largest = exact.abs().amax(1)
    assert (scale[:, 0] <= largest / 448 * (1 + 2.0**-10) + 2.0**-24).all()
    assert (found.k_scale > 0).all()
    for dtype in DTYPES:
        assert torch.isfinite(back.to(dtype)).all()


def check_integer_errors(rows: torch.Tensor, kind: CodeKind) -> None:
    """Every number comes back to half a scale, but for the rounding of fp32 itself."""
    found = quantize_kv(one_head(rows), kind, no_mean(kind, rows.shape[1]))
    back, _ = reference.head_rows(found, 0)
    exact, scale = rows.double(), found.k_scale.double()[:, None]
    rounding = 2.0**-20 * (exact.abs() + found.k_zero.double().abs()[:, None] + scale)
    assert ((back.double() - exact).abs() <= scale / 2 + rounding).all()
    # The scale itself is no larger than float16 makes it.
    spread = exact.amax(1) - exact.amin(1)
    allowed = (spread + exact.abs().amax(1) * 2.0**-10) / LEVELS[kind] * (1 + 2.0**-9) + 2.0**-23
    assert (scale[:, 0] <= allowed).all()
    for name in ("k_scale", "k_zero", "v_scale", "v_zero"):
        assert torch.isfinite(getattr(found, name)).all()
    assert (found.k_scale > 0).all()


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([1e-8, 1e-3, 1.0, 300.0, 1e4]),
    offset=st.sampled_from([0.0, -1.0, 7.0, -3e4, 5e4]),
    seed=st.integers(0, 10_000),
)
def test_a_number_comes_back_to_the_precision_of_its_kind(
    kind: CodeKind, dtype: torch.dtype, magnitude: float, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(5, 64, generator=generator) * magnitude + offset
    check_errors(rows.to(dtype), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([0.0, 0.0], id="zeros"),
        pytest.param([-3.7, -3.7], id="constant"),
        pytest.param([65504.0, 65504.0], id="constant-largest"),
        pytest.param([-65504.0, 65504.0], id="widest"),
        pytest.param([-65503.9, 65503.9], id="widest-unrounded"),
        pytest.param([1e-30, -1e-30], id="tiny"),
        pytest.param([2.0**-24, 0.0], id="smallest-half"),
    ],
)
def test_an_extreme_row_keeps_finite_scales_that_are_not_zero(
    row: list[float], kind: CodeKind
) -> None:
    check_errors(torch.tensor([row * 32]), kind)


def test_zeros_are_the_nearest_float16_that_is_not_above() -> None:
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    halves = halves[halves.abs() < 65504]
    down = torch.full_like(halves, -torch.inf)
    just_below = torch.nextafter(halves.float(), down.float())
    for values, expected in (
        (halves.float(), halves),
        (just_below, torch.nextafter(halves, down)),
    ):
        found = quantize_kv(one_head(values[:, None].expand(-1, 2).contiguous()), "int8")
        assert torch.equal(found.k_zero, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -65520.0, 1e30], ids=str)
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_value_that_no_scale_can_hold_is_refused(name: str, bad: float, kind: CodeKind) -> None:
    k, v = torch.randn(2, 3, 64)
    (k if name == "k" else v)[1, 7] = bad
    with pytest.raises(OutOfRange, match=f"^{name}: "):
        quantize_kv(one_head(k, v), kind, no_mean(kind, 64))


def test_keys_that_their_mean_carries_out_of_range_are_refused() -> None:
    mean = torch.full((1, 64), -60_000.0, dtype=torch.float16)
    with pytest.raises(OutOfRange, match=r"^k - k_mean: "):
        quantize_kv(one_head(torch.full((1, 64), 60_000.0)), "int4", mean)


@pytest.mark.parametrize(
    ("kind", "row_bytes"), [("int8", 128 + 4), ("int4", 64 + 4), ("fp8", 128 + 2)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_takes_exactly_the_bytes_of_the_format(
    dtype: torch.dtype, kind: CodeKind, row_bytes: int
) -> None:
    found = quantized(ragged([5, 0, 12], 128, seed=1, dtype=dtype), kind)
    assert found.size_bytes == 17 * 2 * row_bytes


def test_each_head_loses_its_own_channel_means() -> None:
    rows = ragged([7, 0, 9], 64, seed=2)
    heads = torch.tensor([0] * 7 + [2] * 9)
    far = torch.randn(3, 64) * 50
    shifted = RaggedKV(rows.k + far[heads], rows.v, rows.start, rows.length)
    found = quantize_kv(shifted, "int4", far.half())
    for head in (0, 2):
        back, _ = reference.head_rows(found, head)
        error = (back - shifted.head_rows(head)[0]).abs().max()
        # Sixteen steps over the few numbers left, not over the far means.
        assert error < 8 / 15


def test_a_row_that_is_not_like_the_mean_keeps_its_own_small_scale() -> None:
    mean = torch.randn(1, 64) * 50
    rows = torch.randn(4, 64) + mean
    rows[2] = torch.randn(64) * 0.1
    found = quantize_kv(one_head(rows), "int4", mean.half())
    assert (found.k_scale > 0).tolist() == [True, True, False, True]
    back, _ = reference.head_rows(found, 0)
    scale = found.k_scale.abs().float()[:, None]
    assert ((back - rows).abs() <= scale / 2 * 1.001 + 1e-4).all()
    assert scale[2] < 1 / 15


def test_the_channel_mean_is_that_of_every_token() -> None:
    k = torch.randn(2, 50, 64, dtype=torch.bfloat16) + 3
    torch.testing.assert_close(
        channel_mean(k).float(), k.float().mean(dim=1), rtol=2.0**-10, atol=1e-6
    )
    with pytest.raises(OutOfRange, match=r"^k_mean: "):
        channel_mean(torch.full((1, 2, 64), torch.nan))


def test_a_shape_that_cannot_be_packed_is_refused_by_name() -> None:
    with pytest.raises(ShapeError, match=r"^head_dim: found 65"):
        quantize_kv(one_head(torch.randn(3, 65)), "int4", no_mean("int4", 65))
    with pytest.raises(ShapeError, match=r"k_mean: found none with int4"):
        quantize_kv(one_head(torch.randn(3, 64)), "int4")
    with pytest.raises(ShapeError, match=r"k_mean: found one with int8"):
        quantize_kv(one_head(torch.randn(3, 64)), "int8", no_mean("int4", 64))
    short = ragged([4, 4], 64, seed=1).truncated(torch.tensor([4, 1], dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"^length: .*all 8 rows"):
        quantize_kv(short, "int8")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_odd_width_is_no_trouble_in_8_bits(kind: CodeKind) -> None:
    check_errors(torch.randn(3, 65), kind)


def test_parts_that_disagree_make_no_quantised_rows() -> None:
    good = quantized(ragged([4, 4], 64, seed=3), "int4")
    assert isinstance(good, QuantizedKV)
    parts = {part.name: getattr(good, part.name) for part in fields(good) if part.init}
    for name, bad in (
        ("v", good.v[:, :8]),
        ("k_scale", good.k_scale.float()),
        ("v_zero", good.v_zero[:3]),
        ("k_mean", good.k_mean[:1]),
        ("dtype", torch.uint8),
        ("length", good.length + 1),
    ):
        with pytest.raises(ShapeError, match=name):
            QuantizedKV(**{**parts, name: bad})
    with pytest.raises(ShapeError, match=r"^length: "):
        good.truncated(good.length + 1)


shapes = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.sampled_from([0, 1, 2, 7, 130]), min_size=1, max_size=3),
        "group_size": st.integers(1, 4),
        "head_dim": st.sampled_from([64, 96, 128, 256]),
        "kind": st.sampled_from(KINDS),
        "seed": st.integers(0, 10_000),
    }
)


# At head size 256 scores reach 20, and their roundings are seen in what they weigh.
ATOL = 5e-5


@settings(max_examples=20)
@given(shape=shapes, tails=st.lists(st.sampled_from([1, 2, 65]), min_size=1, max_size=3))
def test_decode_over_quantised_rows_equals_the_oracle(shape: dict, tails: list[int]) -> None:
    rows = ragged(shape["lengths"], shape["head_dim"], shape["seed"])
    context, heads = quantized(rows, shape["kind"]), rows.num_kv_heads
    own = [dense(heads, tokens, shape["head_dim"]) for tokens in tails]
    q = torch.randn(len(tails), heads * shape["group_size"], shape["head_dim"])
    out = ragged_decode(q, context, own, scale=0.3)
    expected = reference.ragged_decode(q, context, own, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=ATOL)


@settings(max_examples=12)
@given(shape=shapes, tokens=st.integers(1, 9), earlier=st.integers(0, 5))
def test_prefill_over_quantised_rows_equals_the_oracle(
    shape: dict, tokens: int, earlier: int
) -> None:
    rows = ragged(shape["lengths"], shape["head_dim"], shape["seed"])
    context, heads = quantized(rows, shape["kind"]), rows.num_kv_heads
    tail = dense(heads, earlier + tokens, shape["head_dim"])
    q = torch.randn(heads * shape["group_size"], tokens, shape["head_dim"])
    out = ragged_prefill(q, context, tail, scale=0.3)
    expected = reference.ragged_prefill(q, context, tail, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=ATOL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_several_blocks_equals_the_oracle(
    kind: CodeKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_CODE_ROWS", 32)
    context = quantized(ragged([31, 97, 64, 33], 64, seed=7), kind)
    q, tail = torch.randn(1, 8, 64), dense(4, 2, 64)
    out = ragged_decode(q, context, [tail], scale=0.3)
    expected = reference.ragged_decode(q, context, [tail], scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_answers_are_the_oracle_rounded(dtype: torch.dtype, kind: CodeKind) -> None:
    context = quantized(ragged([300, 0], 64, seed=5, dtype=dtype), kind)
    tail, q = dense(2, 9, 64, dtype), torch.randn(1, 8, 64, dtype=dtype)
    out = ragged_decode(q, context, [tail], scale=0.125)
    assert out.dtype == dtype
    expected = reference.ragged_decode(q, context, [tail], scale=0.125)
    # Three roundings to dtype: of the tail's weights, of its output, of the whole.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=3 * step)


def test_one_batch_may_mix_quantised_contexts_with_others() -> None:
    runs = (([40, 0], "int8"), ([3, 7], None), ([9, 1], "int4"), ([8, 8], "fp8"))
    groups = tuple(
        DecodeGroup(quantized(ragged(lengths, 64, seed), kind), (dense(2, 3, 64),))
        for seed, (lengths, kind) in enumerate(runs)
    )
    q = torch.randn(4, 6, 64)
    together = ragged_decode_batch(q, DecodeBatch(groups), scale=0.1)
    pieces = zip(q.split(1), groups, strict=True)
    alone = [ragged_decode(rows, own.context, own.tails, scale=0.1) for rows, own in pieces]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_behind_a_shorter_run_are_never_read(kind: CodeKind) -> None:
    context = quantized(ragged([20, 30], 64, seed=4), kind)
    short = context.truncated(torch.tensor([5, 0], dtype=torch.int32))
    for part in (context.k_scale, context.k_zero, context.v_scale, context.v_zero):
        if part is not None:
            part[5:] = torch.nan
    out = ragged_decode(torch.randn(1, 2, 64), short, [dense(2, 1, 64)], scale=0.2)
    assert torch.isfinite(out).all()


def test_a_tail_of_another_dtype_than_was_quantised_is_refused() -> None:
    context = quantized(ragged([4, 4], 64, seed=6, dtype=torch.bfloat16), "int8")
    with pytest.raises(ShapeError, match=r"^tail: "):
        ragged_decode(torch.randn(1, 2, 64).bfloat16(), context, [dense(2, 1, 64)], scale=1.0)
