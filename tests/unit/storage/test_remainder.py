"""What stands for the rows that a ratio leaves out, from the rows of a build to those of a load."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
from redis.asyncio import Redis

from kvkeep_storage import range_plan
from kvkeep_storage.artifact import (
    CacheDtype,
    CacheRows,
    LayerRows,
    LayerScales,
    Quantization,
    RowBytes,
    row_bytes,
)
from kvkeep_storage.errors import Corrupt, Invalid
from kvkeep_storage.manifest import Manifest, sha256_hex
from kvkeep_storage.reindex import ReindexReport, reindex
from kvkeep_storage.slab import EncodedSlab, encode_slab, tensor_names

from ...support.caches import RATIOS, assert_equal_rows, facts_for, prefix_of, random_rows
from ...support.slabs import decode_slabs, layout_of, with_content
from ...support.stores import Stores

DTYPES: tuple[CacheDtype, ...] = ("float32", "bfloat16", "float16")
KINDS: tuple[Quantization, ...] = ("none", "int8", "int4", "fp8")
NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def _slabs(rows: CacheRows) -> list[EncodedSlab]:
    return [encode_slab(rows, band) for band in range(len(rows.ratios))]


def _remainder(rows: CacheRows, layer: int) -> RowBytes:
    found = rows.layers[layer].remainder
    assert found is not None
    return found


def _with_remainders(rows: CacheRows, remainders: list[RowBytes | None]) -> CacheRows:
    pairs = zip(rows.layers, remainders, strict=True)
    return replace(rows, layers=tuple(replace(layer, remainder=new) for layer, new in pairs))


def _without(rows: CacheRows) -> CacheRows:
    return _with_remainders(rows, [None] * rows.num_layers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("range_bytes", [64, range_plan.RANGE_BYTES], ids=["many reads", "one"])
def test_every_band_comes_back_with_its_own_remainder(
    monkeypatch: pytest.MonkeyPatch,
    quantization: Quantization,
    dtype: CacheDtype,
    range_bytes: int,
) -> None:
    monkeypatch.setattr(range_plan, "RANGE_BYTES", range_bytes)
    rows = random_rows(dtype=dtype, quantization=quantization, num_layers=3, remainder=True)
    slabs = _slabs(rows)
    for bands in (1, 2, 3):
        found = decode_slabs(rows, slabs[:bands])
        assert found.has_remainder
        assert_equal_rows(found, prefix_of(rows, bands))


@pytest.mark.parametrize("quantization", KINDS)
def test_a_band_that_adds_no_row_has_a_remainder_all_the_same(quantization: Quantization) -> None:
    counts = np.zeros((3, 2, 2), np.int32)
    counts[1, 0] = (2, 0)
    rows = random_rows(counts=counts, protected_rows=0, quantization=quantization, remainder=True)
    assert_equal_rows(decode_slabs(rows, _slabs(rows)), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", KINDS)
def test_a_slab_holds_the_remainder_of_its_band_in_the_models_dtype(
    quantization: Quantization, dtype: CacheDtype, tmp_path: Path
) -> None:
    rows = random_rows(dtype=dtype, quantization=quantization, remainder=True)
    for band, slab in enumerate(_slabs(rows)):
        path = tmp_path / f"kv-{band:02}.safetensors"
        path.write_bytes(slab.content)
        with safetensors.safe_open(path, framework="numpy") as opened:
            names = [
                name
                for layer in range(2)
                for name in tensor_names(layer, quantization, band, has_remainder=True)
            ]
            assert sorted(opened.keys()) == sorted(names)
            for layer in range(2):
                for index, side in enumerate("kv"):
                    tensor = f"layers.{layer:03d}.remainder_{side}"
                    assert opened.get_slice(tensor).get_dtype() == NAMES[dtype]
                    assert opened.get_slice(tensor).get_shape() == [2, 2 * rows.head_dim]
                    expected = _remainder(rows, layer)[band, index].tobytes()
                    assert slab.content[_place(rows, slab, band, layer, index)] == expected


def _place(rows: CacheRows, slab: EncodedSlab, band: int, layer: int, index: int) -> slice:
    """Where K or V of a layer's remainder lies in the file."""
    start = layout_of(rows, band, slab).starts[layer][index - 2]
    return slice(start, start + _remainder(rows, layer)[band, index].nbytes)


def _counted_up(quantization: Quantization) -> CacheRows:
    """Rows that no random numbers are in."""
    width = row_bytes("bfloat16", quantization, 4)
    codes = np.arange(2 * 6 * width, dtype=np.uint8).reshape(2, 6, width)
    scales = None
    if quantization == "int4":
        halves = np.arange(4 * 6, dtype=np.float16).reshape(4, 6)
        scales = LayerScales(*halves, k_mean=np.ones((2, 4), np.float16))
    layer = LayerRows(codes[0], codes[1], np.arange(6, dtype=np.int32), scales)
    counts = np.array([[[1, 2]], [[3, 0]]], np.int32)
    return CacheRows("bfloat16", 2, 4, (0.1, 0.2), counts, counts[0], (layer,), quantization)


@pytest.mark.parametrize(
    ("quantization", "digest"),
    [
        ("none", "6ccb3df01d1b9e72571d4f45a979489d948c02fa2820f46cd5db83ef1726d956"),
        ("int4", "806b772abed62624ea8101a3c3b0aa61d7498446ca8d7708f2734fd4b93f7e0f"),
    ],
)
def test_slabs_without_any_are_written_as_by_versions_that_knew_none(
    quantization: Quantization, digest: str
) -> None:
    slabs = _slabs(_counted_up(quantization))
    assert sha256_hex(b"".join(slab.content for slab in slabs)) == digest


@pytest.mark.parametrize("quantization", KINDS)
def test_slabs_and_manifests_of_caches_without_any_say_nothing_of_them(
    quantization: Quantization,
) -> None:
    rows = random_rows(quantization=quantization, remainder=True)
    for band in range(3):
        assert b"remainder" in encode_slab(rows, band).content
        plain = encode_slab(_without(rows), band)
        assert b"remainder" not in plain.content
        assert plain == encode_slab(random_rows(quantization=quantization), band)
    plain_rows = _without(rows)
    digests = tuple(slab.digests for slab in _slabs(plain_rows))
    made = Manifest.describe(plain_rows, digests, facts_for(plain_rows), created_at=1.5)
    assert b"remainder" not in made.encode()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", KINDS)
def test_a_change_of_any_byte_of_a_remainder_is_seen(
    quantization: Quantization, dtype: CacheDtype
) -> None:
    rows = random_rows(dtype=dtype, quantization=quantization, head_dim=2, remainder=True)
    slabs = _slabs(rows)
    chosen = random.Random(7)
    for band, layer, index in np.ndindex(3, 2, 2):
        place = _place(rows, slabs[band], band, layer, index)
        for byte in range(place.start, place.stop):
            content = bytearray(slabs[band].content)
            content[byte] ^= chosen.randrange(1, 256)
            damaged = [*slabs[:band], with_content(slabs[band], bytes(content))]
            with pytest.raises(Corrupt, match=f"layer {layer}: its digest"):
                decode_slabs(rows, damaged)


Swap = Callable[[list[RowBytes]], list[RowBytes]]
SWAPS: dict[str, Swap] = {
    "k with v": lambda found: [part[:, ::-1] for part in found],
    "head with head": lambda found: [part[:, :, ::-1] for part in found],
    "head with head in k only": lambda found: [
        np.stack([part[:, 0, ::-1], part[:, 1]], axis=1) for part in found
    ],
    "band with band": lambda found: [part[::-1] for part in found],
    "layer with layer": lambda found: found[::-1],
    "another cache's": lambda found: [
        _remainder(random_rows(99, remainder=True), layer) for layer in range(len(found))
    ],
    "zeros": lambda found: [np.zeros_like(part) for part in found],
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("quantization", KINDS)
def test_remainders_in_each_others_places_are_seen(quantization: Quantization, swap: str) -> None:
    rows = random_rows(quantization=quantization, remainder=True)
    found = SWAPS[swap]([_remainder(rows, layer) for layer in range(2)])
    swapped = _with_remainders(rows, [np.ascontiguousarray(part) for part in found])
    slabs, others = _slabs(rows), _slabs(swapped)
    seen = 0
    for band in range(3):
        assert len(others[band].content) == len(slabs[band].content)
        if others[band].content == slabs[band].content:
            # The middle one of three that are turned round.
            assert (swap, band) == ("band with band", 1)
            continue
        damaged = [*slabs[:band], with_content(slabs[band], others[band].content)]
        with pytest.raises(Corrupt, match="its digest"):
            decode_slabs(rows, damaged)
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("quantization", KINDS)
def test_a_slab_with_remainders_and_one_without_are_not_taken_for_each_other(
    quantization: Quantization,
) -> None:
    rows = random_rows(quantization=quantization, remainder=True)
    plain = _without(rows)
    with pytest.raises(Corrupt, match="remainder_k"):
        layout_of(rows, 0, encode_slab(plain, 0))
    with pytest.raises(Corrupt, match=r"a tensor begins|tensors end"):
        layout_of(plain, 0, encode_slab(rows, 0))


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_remainders_that_are_not_finite_are_never_stored(
    value: float, dtype: CacheDtype, quantization: Quantization
) -> None:
    for index, side in enumerate("kv"):
        rows = random_rows(dtype=dtype, quantization=quantization, remainder=True)
        last = _remainder(rows, 1)[2, index, -1]
        if dtype == "bfloat16":
            last.view(np.uint16)[-1] = np.array([value], np.float32).view(np.uint32)[0] >> 16
        else:
            last.view(dtype)[-1] = value
        encode_slab(rows, 1)
        with pytest.raises(Invalid, match=rf"layers\.001\.remainder_{side}: holds an infinity"):
            encode_slab(rows, 2)


BROKEN: dict[str, Callable[[RowBytes], RowBytes | None]] = {
    "missing": lambda part: None,
    "a band less": lambda part: part[:2],
    "k only": lambda part: part[:, :1],
    "a head less": lambda part: part[:, :, 1:],
    "as wide as codes": lambda part: part[..., :8],
    "not contiguous": lambda part: part[::-1],
    "halves": lambda part: part.view(np.float16),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("quantization", KINDS)
def test_remainders_that_disagree_with_their_rows_are_refused_by_name(
    quantization: Quantization, broken: str
) -> None:
    rows = random_rows(quantization=quantization, remainder=True)
    changed = BROKEN[broken](_remainder(rows, 1))
    with pytest.raises(Invalid, match=r"^layers\.001\.remainder: "):
        _with_remainders(rows, [_remainder(rows, 0), changed])
    with pytest.raises(Invalid, match=r"^layers\.001\.remainder: every layer has one"):
        _with_remainders(rows, [None, _remainder(rows, 1)])


def test_the_bytes_of_remainders_are_counted() -> None:
    rows = random_rows(quantization="int4", remainder=True)
    # Bands, K and V, heads, and two rows of 8 numbers of bf16.
    size_bytes = 3 * 2 * 2 * 2 * 16
    for layer, plain in zip(rows.layers, _without(rows).layers, strict=True):
        assert layer.kv_bytes == plain.kv_bytes + size_bytes
    assert rows.size_bytes == _without(rows).size_bytes + 2 * size_bytes


@pytest.mark.anyio
@pytest.mark.parametrize("quantization", KINDS)
async def test_a_load_at_any_ratio_gives_the_remainders_of_its_bands(
    stores: Stores, quantization: Quantization
) -> None:
    rows = random_rows(quantization=quantization, num_layers=11, rows_max=9, remainder=True)
    facts = facts_for(rows)
    await stores.register(facts)
    await stores.build(rows, facts)
    for bands, ratio in enumerate(RATIOS, start=1):
        loaded = await stores.load(facts, ratio)
        assert loaded.manifest.has_remainder
        assert_equal_rows(loaded.rows, prefix_of(rows, bands))


@pytest.mark.anyio
async def test_a_cache_with_remainders_is_another_one_than_the_same_rows_without(
    stores: Stores,
) -> None:
    rows = random_rows(remainder=True)
    plain = _without(rows)
    for number, kept in enumerate((rows, plain)):
        await stores.register(facts_for(kept), f"ctx_{number}")
        await stores.build(kept, facts_for(kept))
    for kept in (rows, plain):
        assert_equal_rows((await stores.load(facts_for(kept))).rows, kept)


@pytest.mark.anyio
async def test_a_cache_with_remainders_comes_back_after_redis_was_lost(
    stores: Stores, redis: Redis
) -> None:
    rows = random_rows(quantization="int4", remainder=True)
    await stores.register(facts_for(rows))
    await stores.build(rows, facts_for(rows))
    await redis.flushall()
    report = await reindex(stores.objects, stores.metadata)
    assert report == ReindexReport(contexts=1, caches=1, damaged=())
    assert_equal_rows((await stores.load(facts_for(rows))).rows, rows)
