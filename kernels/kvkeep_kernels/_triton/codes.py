# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
# Kernel arguments are traced values, typed by Triton at each launch.
"""One tile of query rows over one run of quantised rows: ``softmax.fold_run`` for codes.

Codes of 8 and 4 bits, floats included, are exact in every float type, so keys are multiplied as
codes, and scale and zero meet the fp32 product. Floats are made of bits here, by the same
instructions everywhere: not every target has such a type, and that of gfx942 is another one.
Values become numbers first: their scales would have to meet the weights, which fp16 has not the
range for.
"""

import triton
import triton.language as tl

from kvkeep_kernels._triton.softmax import in_window, scaled_logits


@triton.jit
def fold_codes(
    q_rows,
    peak,
    mass,
    acc,
    k,
    v,
    k_scale,
    k_zero,
    v_scale,
    v_zero,
    rows,
    scale_log2,
    window,
    mean,
    KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold rows 0 to ``rows`` into the state of every row of the tile.

    Shapes: q_rows, acc [BLOCK_M, BLOCK_D]; peak, mass [BLOCK_M]; k, v point at row 0 of packed
    rows, the others at the float16 of row 0; zeros are None with fp8. ``window`` and SOFT_CAP as in
    ``fold_run``.
    ``mean`` is what ``mean_products`` gives, None where rows have no channel means.
    """
    q_sum = tl.sum(q_rows.to(tl.float32), axis=1)
    for first in range(0, rows, BLOCK_N):
        row = first + tl.arange(0, BLOCK_N)
        is_row = row < rows
        keys = _codes(k, row, is_row, KIND, HEAD_DIM, BLOCK_D).to(q_rows.dtype)
        scales = tl.load(k_scale + row, mask=is_row, other=0.0).to(tl.float32)
        # Not TF32 for fp32 inputs: three decimal digits are no fp32 result.
        products = tl.dot(q_rows, tl.trans(keys), input_precision="ieee")
        products = products * tl.abs(scales)[None, :]
        if k_zero is not None:
            zeros = tl.load(k_zero + row, mask=is_row, other=0.0).to(tl.float32)
            products += q_sum[:, None] * zeros[None, :]
        if mean is not None:
            # A negative scale is that of a row without channel means.
            products += tl.where(scales[None, :] > 0.0, mean[:, None], 0.0)
        logits = scaled_logits(products, scale_log2, SOFT_CAP)
        is_seen = is_row[None, :]
        if window is not None:
            is_seen = is_seen & in_window(row, is_row, window)
        logits = tl.where(is_seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        codes = _codes(v, row, is_row, KIND, HEAD_DIM, BLOCK_D)
        scales = tl.load(v_scale + row, mask=is_row, other=0.0).to(tl.float32)
        numbers = codes * scales[:, None]
        if v_zero is not None:
            zeros = tl.load(v_zero + row, mask=is_row, other=0.0).to(tl.float32)
            numbers += zeros[:, None]
        values = numbers.to(q_rows.dtype)
        mass = mass * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        peak = new_peak
    return peak, mass, acc


@triton.jit
def mean_products(q_rows, k_mean, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """What a head's channel means [HEAD_DIM] add to every product of a query row: [BLOCK_M]."""
    column = tl.arange(0, BLOCK_D)
    mean = tl.load(k_mean + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    return tl.sum(q_rows.to(tl.float32) * mean[None, :], axis=1)


@triton.jit
def _codes(rows, row, is_row, KIND: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Codes of packed rows as fp32 [BLOCK_N, BLOCK_D]; columns from HEAD_DIM on are 0."""
    codes_each: tl.constexpr = 2 if KIND == "int4" else 1
    width: tl.constexpr = HEAD_DIM // codes_each
    byte = tl.arange(0, BLOCK_D // codes_each)
    packed = tl.load(
        rows + row.to(tl.int64)[:, None] * width + byte[None, :],
        mask=is_row[:, None] & (byte < width)[None, :],
        other=0,
    )
    if KIND == "int4":
        packed = tl.interleave(packed & 0xF, packed >> 4)
    if KIND == "fp8":
        # As in ``quantize.code_values``.
        half = ((packed.to(tl.int16) << 8) >> 1) & ~0x4000
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return packed.to(tl.float32)
