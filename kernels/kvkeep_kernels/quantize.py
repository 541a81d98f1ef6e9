"""Rows of 8 or 4 bits a number: one scale per row and head, for K and for V.

Integers have a zero beside it: a number is ``zero + scale * code``. Zero is rounded down to
float16 and scale up, before the codes are chosen, so that they reach every number of the row, to
half a scale. fp8 (float8 e4m3 without infinities) is symmetric: the largest number of a row is
448 scales, and every other comes back to a sixteenth of itself, or if tiny to 2 ** -10 scales.

Keys have channels that are large in nearly every row, which leave 4 bits nothing for the others:
each head's channel means are subtracted first, from the rows that this leaves the smaller scale.
The others are few and matter: the tokens that much attention sinks into are not like the mean. A
row of K without the means has a negative scale, whose size counts. A query's product with the
means is one number for all rows of a head.

Source: per-token asymmetric quantisation as in KIVI; key centring as in SmoothAttention and KVzip.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvkeep_kernels.layout import CodeKind, OutOfRange, QuantizedKV, RaggedKV, ShapeError

_FLOAT16_MAX = torch.finfo(torch.float16).max
_SMALLEST_SCALE = 2.0**-24
# As an int16: the float16 that is negative and nearest to zero.
_BELOW_ZERO = -0x7FFF
_FLOAT8_MAX = 448.0
# The largest float16 of which 448 are a float16 too: no value overflows that its model could hold.
_LARGEST_FLOAT8_SCALE = 146.125
_FLOAT8_TO_FLOAT16 = 2.0**8


def channel_mean(k: Tensor) -> Tensor:
    """Mean of every head's channels over its rows, as ``quantize_kv`` takes it.

    Shapes: k [num_kv_heads, rows, head_dim], rows >= 1. Returns [num_kv_heads, head_dim] float16.
    Raises: OutOfRange, when a mean is not finite in float16.
    """
    mean = k.mean(dim=1, dtype=torch.float32)
    _check_range("k_mean", mean)
    return mean.to(torch.float16)


def quantize_kv(rows: RaggedKV, kind: CodeKind, k_mean: Tensor | None = None) -> QuantizedKV:
    """Quantise one layer.

    A row of K takes ``head_dim + 4`` bytes in int8, ``head_dim / 2 + 4`` in int4 and
    ``head_dim + 2`` in fp8, and so does one of V.
    Shapes: rows as ``compact`` returns them, head after head without a gap; k_mean
        [num_kv_heads, head_dim] float16, with int4 and only then.
    Modifies: nothing; the new buffers alias nothing but k_mean, start and length.
    The host waits for ``length`` and for the check of ranges.
    Raises: ShapeError, also for an odd head_dim in int4; OutOfRange.
    """
    if kind == "int4" and rows.head_dim % 2:
        raise ShapeError("head_dim", rows.head_dim, "an even number for int4")
    if int(rows.length.sum()) != len(rows.k):
        raise ShapeError("length", rows.length.tolist(), f"adding to all {len(rows.k)} rows")
    k = rows.k.float()
    if kind == "fp8":
        keys, values = _floats("k", k), _floats("v", rows.v.float())
    else:
        bits: Literal[4, 8] = 4 if kind == "int4" else 8
        keys, values = _integers("k", k, bits), _integers("v", rows.v.float(), bits)
        if k_mean is not None:
            means = torch.repeat_interleave(k_mean.float(), rows.length, dim=0)
            keys = _smaller(_integers("k - k_mean", k - means, bits), keys)
    return QuantizedKV(
        kind=kind,
        k=keys.codes,
        v=values.codes,
        k_scale=keys.scale,
        k_zero=keys.zero,
        v_scale=values.scale,
        v_zero=values.zero,
        k_mean=k_mean,
        start=rows.start,
        length=rows.length,
        dtype=rows.dtype,
        placement=rows.placement,
    )


def code_values(codes: Tensor, kind: CodeKind) -> Tensor:
    """What packed codes stand for before scale and zero: fp32 [rows, head_dim]."""
    if kind == "int8":
        return codes.float()
    words = codes.to(torch.int16)
    if kind == "int4":
        # Both halves of a byte at once: they become the two bytes of a little-endian word.
        words = words.bitwise_left_shift(4).bitwise_or_(words).bitwise_and_(0x0F0F)
        return words.view(torch.uint8).float()
    # The sign to the top, exponent and fraction to where float16 has them, whose exponents
    # count from 8 less. torch's own conversion takes six times as long on a CPU.
    words = words.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(~0x4000)
    return words.view(torch.float16).float().mul_(_FLOAT8_TO_FLOAT16)


class _QuantizedRows(NamedTuple):
    codes: Tensor
    scale: Tensor
    zero: Tensor | None


def _floats(name: str, rows: Tensor) -> _QuantizedRows:
    """Quantise [rows, head_dim] fp32 to fp8."""
    _check_range(name, rows)
    largest = rows.abs().amax(dim=1)
    scale = _rounded_up(largest.div_(_FLOAT8_MAX).clamp_(min=_SMALLEST_SCALE))
    scale.clamp_(max=_LARGEST_FLOAT8_SCALE)
    # Beyond its largest number the conversion gives NaN.
    codes = (rows / scale.float()[:, None]).clamp_(-_FLOAT8_MAX, _FLOAT8_MAX)
    return _QuantizedRows(codes.to(torch.float8_e4m3fn).view(torch.uint8), scale, None)


def _integers(name: str, rows: Tensor, bits: Literal[4, 8]) -> _QuantizedRows:
    """Quantise [rows, head_dim] fp32 to unsigned integers."""
    _check_range(name, rows)
    levels = 2**bits - 1
    lowest, highest = torch.aminmax(rows, dim=1)
    zero = _rounded_down(lowest)
    # Never zero, so that whoever divides by it, or looks for lost rows, has no special case.
    scale = (highest - zero.float()).div_(levels).clamp_(min=_SMALLEST_SCALE)
    scale16 = _rounded_up(scale)
    codes = (rows - zero.float()[:, None]).div_(scale16.float()[:, None]).round_()
    codes = codes.clamp_(0, levels).to(torch.uint8)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return _QuantizedRows(codes, scale16, zero)


def _smaller(centred: _QuantizedRows, plain: _QuantizedRows) -> _QuantizedRows:
    """Each row in the form of the smaller scale; that of a plain one is negative."""
    assert centred.zero is not None
    assert plain.zero is not None
    is_centred = centred.scale <= plain.scale
    return _QuantizedRows(
        torch.where(is_centred[:, None], centred.codes, plain.codes),
        torch.where(is_centred, centred.scale, -plain.scale),
        torch.where(is_centred, centred.zero, plain.zero),
    )


def _rounded_up(values: Tensor) -> Tensor:
    return -_rounded_down(-values)


def _rounded_down(values: Tensor) -> Tensor:
    """The nearest float16 that is not above; values fp32 within its range."""
    nearest = values.to(torch.float16)
    # ``nextafter`` by bits: on GPUs torch has it for float16 only since 2.6.
    bits = nearest.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, torch.where(bits == 0, _BELOW_ZERO, bits + 1))
    return torch.where(nearest.float() > values, below.view(torch.float16), nearest)


def _check_range(name: str, rows: Tensor) -> None:
    # Not "any beyond", which a NaN would pass.
    if not bool((rows.abs() <= _FLOAT16_MAX).all()):
        raise OutOfRange(name)
