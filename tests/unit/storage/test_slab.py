import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_storage.artifact import CacheDtype, LayerRows, Quantization
from kvkeep_storage.errors import Corrupt, Invalid
from kvkeep_storage.layer_parts import empty_layers
from kvkeep_storage.slab import EncodedSlab, encode_slab, tensor_names

from ...support.caches import assert_equal_rows, prefix_of, random_rows
from ...support.slabs import decode_slabs, layout_of, with_content

DTYPES: tuple[CacheDtype, ...] = ("float32", "bfloat16", "float16")


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    quantization=st.sampled_from(("none", "none", "int8", "int4", "fp8")),
    num_layers=st.integers(1, 12),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from((1, 3, 8)),
    protected_rows=st.integers(0, 3),
    rows_max=st.integers(0, 4),
    remainder=st.booleans(),
)
def test_every_ratio_comes_back_bit_for_bit(
    seed: int,
    dtype: CacheDtype,
    quantization: Quantization,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    protected_rows: int,
    rows_max: int,
    remainder: bool,
) -> None:
    rows = random_rows(
        seed,
        dtype=dtype,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        # Two channels of int4 lie in a byte.
        head_dim=head_dim * 2 if quantization == "int4" else head_dim,
        protected_rows=protected_rows,
        rows_max=rows_max,
        quantization=quantization,
        remainder=remainder,
    )
    slabs = [encode_slab(rows, band) for band in range(len(rows.ratios))]
    for bands in range(1, len(slabs) + 1):
        assert_equal_rows(decode_slabs(rows, slabs[:bands]), prefix_of(rows, bands))


def test_every_tensor_of_a_loaded_cache_is_contiguous_and_aligned() -> None:
    counts = np.array([[[3, 2], [2, 0], [1, 0]]], np.int32)
    kinds: tuple[Quantization, ...] = ("none", "int4", "fp8")
    for layer in (
        layer for kind in kinds for layer in empty_layers(counts, 6, kind, remainder_row_bytes=6)
    ):
        assert layer.remainder is not None
        scales = () if layer.scales is None else layer.scales.of_rows
        if layer.scales is not None and layer.scales.k_mean is not None:
            scales = (*scales, layer.scales.k_mean)
        for tensor in (layer.k, layer.v, layer.position, *scales, layer.remainder):
            assert tensor.flags.c_contiguous
            assert tensor.flags.writeable
            assert tensor.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slab_is_a_valid_safetensors_file(dtype: CacheDtype, tmp_path: Path) -> None:
    rows = random_rows(dtype=dtype, num_layers=11)
    path = tmp_path / "kv-00.safetensors"
    path.write_bytes(encode_slab(rows, 0).content)
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    with safetensors.safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == {name for i in range(11) for name in tensor_names(i)}
        for index in range(11):
            count, position, k, v = tensor_names(index)
            expected = int(rows.counts[0, index].sum())
            np.testing.assert_array_equal(opened.get_tensor(count), rows.counts[0, index])
            assert opened.get_slice(position).get_dtype() == "I32"
            assert opened.get_slice(position).get_shape() == [expected]
            for name in (k, v):
                assert opened.get_slice(name).get_dtype() == names[dtype]
                assert opened.get_slice(name).get_shape() == [expected, rows.head_dim]


def test_a_slab_holds_each_heads_rows_of_its_band_in_order(tmp_path: Path) -> None:
    rows = random_rows(dtype="float32")
    path = tmp_path / "kv-01.safetensors"
    path.write_bytes(encode_slab(rows, 1).content)
    before, here = rows.counts[0], rows.counts[1]
    with safetensors.safe_open(path, framework="numpy") as opened:
        for index, layer in enumerate(rows.layers):
            starts = np.concatenate([[0], rows.length(index).cumsum()])
            expected = [
                layer.k[starts[head] + before[index, head] :][: here[index, head]]
                for head in range(rows.num_kv_heads)
            ]
            found = opened.get_tensor(tensor_names(index)[2])
            np.testing.assert_array_equal(found.view(np.uint8), np.concatenate(expected))


def test_the_bytes_of_a_slab_are_rows_and_little_else() -> None:
    # SmolLM2-135M's shape, 4,096 tokens; the smallest band has the largest share of overhead.
    ratios = (0.05, 0.1, 0.3)
    kept = np.array([0.05, 0.05, 0.2]) * 4096
    counts = np.empty((3, 30, 3), np.int32)
    counts[:] = kept[:, None, None]
    rows = random_rows(
        dtype="bfloat16",
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        ratios=ratios,
        counts=counts,
        protected_rows=0,
    )
    for band in range(3):
        slab = encode_slab(rows, band)
        kv_bytes = int(counts[band].sum()) * 2 * rows.row_bytes
        header = json.loads(slab.content[8 : slab.digests.header_bytes])
        spans = [header[name]["data_offsets"] for i in range(30) for name in tensor_names(i)[2:]]
        assert sum(end - start for start, end in spans) == kv_bytes
        assert len(slab.content) - kv_bytes <= 0.03 * kv_bytes


@pytest.mark.parametrize(
    ("quantization", "row_bytes"), [("int8", 64 + 4), ("int4", 32 + 4), ("fp8", 64 + 2)]
)
def test_the_bytes_of_a_quantised_slab_are_codes_scales_and_little_else(
    quantization: Quantization, row_bytes: int
) -> None:
    ratios = (0.05, 0.1, 0.3)
    kept = np.array([0.05, 0.05, 0.2]) * 4096
    counts = np.empty((3, 30, 3), np.int32)
    counts[:] = kept[:, None, None]
    rows = random_rows(
        dtype="bfloat16",
        num_layers=30,
        num_kv_heads=3,
        head_dim=64,
        ratios=ratios,
        counts=counts,
        protected_rows=0,
        quantization=quantization,
    )
    stored = others = 0
    for band in range(3):
        slab = encode_slab(rows, band)
        header = json.loads(slab.content[8 : slab.digests.header_bytes])
        spans = [
            header[name]["data_offsets"]
            for i in range(30)
            for name in tensor_names(i, quantization, band=1)[2:]
        ]
        kv_bytes = int(counts[band].sum()) * 2 * row_bytes
        assert sum(end - start for start, end in spans) == kv_bytes
        stored += kv_bytes
        others += len(slab.content) - kv_bytes
    assert stored == sum(layer.kv_bytes for layer in rows.layers)
    # Of what the rows took in bf16.
    assert others <= 0.03 * int(counts.sum()) * 2 * 128


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_quantised_slab_is_a_valid_safetensors_file(
    quantization: Quantization, tmp_path: Path
) -> None:
    rows = random_rows(quantization=quantization)
    for band in range(2):
        path = tmp_path / f"kv-{band:02}.safetensors"
        path.write_bytes(encode_slab(rows, band).content)
        count = int(rows.counts[band, 1].sum())
        with safetensors.safe_open(path, framework="numpy") as opened:
            names = {name for i in range(2) for name in tensor_names(i, quantization, band)}
            assert set(opened.keys()) == names
            assert ("layers.001.k_mean" in names) == (quantization == "int4" and band == 0)
            assert ("layers.001.k_zero" in names) == (quantization != "fp8")
            k, scale = (opened.get_tensor(f"layers.001.{part}") for part in ("k", "v_scale"))
        assert (k.dtype, k.shape) == (np.uint8, (count, rows.row_bytes))
        assert (scale.dtype, scale.shape) == (np.float16, (count,))


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("tensor", ["k_scale", "k_zero", "v_scale", "v_zero", "k_mean"])
def test_scales_that_are_not_finite_are_never_stored(value: float, tensor: str) -> None:
    rows = random_rows(quantization="int4")
    part = getattr(rows.layers[1].scales, tensor)
    part[-1] = value
    with pytest.raises(Invalid, match=f"layers.001.{tensor}: holds an infinity or NaN"):
        encode_slab(rows, 0 if tensor == "k_mean" else 2)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_a_code_of_fp8_that_is_no_number_is_never_stored(tensor: str, code: int) -> None:
    rows = random_rows(quantization="fp8")
    getattr(rows.layers[1], tensor)[-1, -1] = code
    with pytest.raises(Invalid, match=f"layers.001.{tensor}: holds a NaN"):
        encode_slab(rows, 2)


@pytest.mark.parametrize("missing", ["k_zero", "v_zero"])
def test_zeros_belong_to_integers_and_only_to_them(missing: str) -> None:
    rows, floats = random_rows(quantization="int8"), random_rows(quantization="fp8")
    for layers, name in ((rows, missing), (floats, missing)):
        first = layers.layers[0]
        assert first.scales is not None
        zero = None if layers is rows else first.scales.k_scale
        wrong = replace(first, scales=replace(first.scales, **{name: zero}))
        with pytest.raises(Invalid, match="zeros belong to integers"):
            replace(layers, layers=(wrong, *layers.layers[1:]))


@pytest.mark.parametrize("remainder", [False, True], ids=["", "remainder"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_any_flipped_bit_anywhere_is_seen(quantization: Quantization, remainder: bool) -> None:
    rows = random_rows(num_layers=2, head_dim=2, quantization=quantization, remainder=remainder)
    chosen = random.Random(7)
    slabs = [encode_slab(rows, band) for band in range(len(rows.ratios))]
    decode_slabs(rows, slabs)
    for band, slab in enumerate(slabs):
        for index in range(len(slab.content)):
            content = bytearray(slab.content)
            content[index] ^= 1 << chosen.randrange(8)
            damaged = [*slabs[:band], with_content(slab, bytes(content))]
            with pytest.raises(Corrupt):
                decode_slabs(rows, damaged)


def test_a_slab_in_another_ones_place_is_seen() -> None:
    # All of one size, so that only the content differs.
    counts = np.full((2, 2, 2), 3, np.int32)
    rows = random_rows(1, counts=counts, ratios=(0.1, 0.2))
    other = random_rows(2, counts=counts, ratios=(0.1, 0.2))
    slab = encode_slab(rows, 0)
    for foreign in (encode_slab(rows, 1), encode_slab(other, 0)):
        assert len(foreign.content) == len(slab.content)
        with pytest.raises(Corrupt, match="digest"):
            decode_slabs(rows, [with_content(slab, foreign.content)])


def test_field_04_counts_other_than_the_manifests_are_seen_even_under_right_digests() -> None:
    rows = random_rows(counts=np.array([[[2, 3]]], np.int32), ratios=(0.1,))
    slab = encode_slab(rows, 0)
    swapped = replace(rows, counts=np.array([[[3, 2]]], np.int32))
    with pytest.raises(Corrupt, match="counts"):
        decode_slabs(swapped, [slab])


def test_field_11_a_dtype_other_than_the_manifests_is_seen_even_under_right_digests() -> None:
    rows = random_rows(dtype="bfloat16")
    slab = encode_slab(rows, 0)
    with pytest.raises(Corrupt, match="BF16"):
        layout_of(replace(rows, dtype="float16"), 0, slab)


def _with_header(slab: EncodedSlab, text: bytes) -> EncodedSlab:
    """The slab with another header of the same length, under a right digest."""
    header = slab.content[:8] + text.ljust(slab.digests.header_bytes - 8)
    content = header + slab.content[len(header) :]
    digest = xxhash.xxh3_128(header).hexdigest()
    return EncodedSlab(content, replace(slab.digests, header_digest=digest))


def _header_of(slab: EncodedSlab) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(slab.content[8 : slab.digests.header_bytes])
    return parsed


def test_a_right_digest_over_something_that_is_no_header_is_refused() -> None:
    rows = random_rows()
    forged = _with_header(encode_slab(rows, 0), b"[[")
    with pytest.raises(Corrupt, match="header"):
        layout_of(rows, 0, forged)


@pytest.mark.parametrize("shift", [-2, 2])
def test_tensors_that_leave_a_byte_out_or_share_one_are_refused(shift: int) -> None:
    rows = random_rows()
    slab = encode_slab(rows, 0)
    header = _header_of(slab)
    layout_of(rows, 0, _with_header(slab, json.dumps(header, separators=(",", ":")).encode()))
    offsets = header[tensor_names(1)[2]]["data_offsets"]
    offsets[:] = [offset + shift for offset in offsets]
    forged = _with_header(slab, json.dumps(header, separators=(",", ":")).encode())
    with pytest.raises(Corrupt, match="begins at byte"):
        layout_of(rows, 0, forged)


def test_a_tensor_of_another_length_than_its_shape_is_refused() -> None:
    rows = random_rows()
    slab = encode_slab(rows, 0)
    header = _header_of(slab)
    header[tensor_names(1)[2]]["data_offsets"][1] -= 2
    forged = _with_header(slab, json.dumps(header, separators=(",", ":")).encode())
    with pytest.raises(Corrupt, match="are not BF16"):
        layout_of(rows, 0, forged)


def test_tensors_that_end_before_the_file_does_are_refused() -> None:
    rows = random_rows()
    slab = encode_slab(rows, 0)
    longer = EncodedSlab(slab.content, replace(slab.digests, size_bytes=len(slab.content) + 4))
    with pytest.raises(Corrupt, match="tensors end"):
        layout_of(rows, 0, longer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_rows_that_are_not_finite_are_never_stored(
    dtype: CacheDtype, value: float, tensor: str
) -> None:
    rows = random_rows(dtype=dtype)
    layer = rows.layers[1]
    damaged = {"k": layer.k.copy(), "v": layer.v.copy()}
    last_row = damaged[tensor][-1]
    if dtype == "float32":
        last_row.view(np.float32)[-1] = value
    elif dtype == "float16":
        last_row.view(np.float16)[-1] = value
    else:
        last_row.view(np.uint16)[-1] = np.array([value], np.float32).view(np.uint32)[0] >> 16
    bad = replace(rows, layers=(rows.layers[0], LayerRows(**damaged, position=layer.position)))
    encode_slab(bad, 0)
    with pytest.raises(Invalid, match=f"layers.001.{tensor}: holds an infinity or NaN"):
        encode_slab(bad, 2)


def test_the_largest_finite_numbers_are_stored() -> None:
    rows = random_rows(dtype="float16")
    layer = rows.layers[0]
    largest = np.full((len(layer.k), rows.head_dim), np.finfo(np.float16).max, np.float16)
    extreme = LayerRows(np.ascontiguousarray(largest).view(np.uint8), layer.v, layer.position)
    encode_slab(replace(rows, layers=(extreme, rows.layers[1])), 0)
