"""Synthetic caches for tests: rows with every awkward size, and what a build says of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvkeep_storage.artifact import (
    SCALE_NAMES,
    CacheDtype,
    CacheRows,
    Int32Array,
    LayerRows,
    LayerScales,
    Quantization,
    RowBytes,
    row_bytes,
)
from kvkeep_storage.fingerprint import Fingerprint, digest_token_ids
from kvkeep_storage.manifest import ManifestFacts

RATIOS = (0.05, 0.1, 0.3)


def a_fingerprint(**changes: Any) -> Fingerprint:
    plain = Fingerprint(
        model="smol",
        weights_digest="w" * 64,
        tokenizer_digest="t" * 64,
        prefix_text="<|system|>",
        dtype="bfloat16",
        rope="default theta=10000",
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        token_ids_digest=digest_token_ids([1, 2, 3]),
        protected=((0, 4),),
        policy="kvzip",
        policy_version=1,
        policy_parameters={"scoring": "local", "chunk_tokens": 2048},
        quantization="none",
        adapter_digest="",
        tenant_salt="acme",
    )
    return replace(plain, **changes)


REMAINDER_ROWS = 2


def random_rows(
    seed: int = 0,
    *,
    dtype: CacheDtype = "bfloat16",
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    ratios: tuple[float, ...] = RATIOS,
    rows_max: int = 5,
    counts: Int32Array | None = None,
    protected_rows: int = 1,
    quantization: Quantization = "none",
    remainder: bool = False,
) -> CacheRows:
    """Rows with ragged counts, some of them zero; every head keeps its protected ones."""
    rng = np.random.default_rng(seed)
    if counts is None:
        shape = (len(ratios), num_layers, num_kv_heads)
        counts = rng.integers(0, rows_max + 1, shape).astype(np.int32)
        counts[0] += protected_rows
    layers = tuple(
        _random_layer(rng, counts[:, layer].sum(axis=0), head_dim, dtype, quantization)
        for layer in range(counts.shape[1])
    )
    if remainder:
        shape = (len(ratios), 2, counts.shape[2], REMAINDER_ROWS * head_dim)
        layers = tuple(
            replace(layer, remainder=_random_numbers(rng, shape, dtype)) for layer in layers
        )
    protected = np.full(counts.shape[1:], protected_rows, np.int32)
    return CacheRows(
        dtype, counts.shape[2], head_dim, ratios, counts, protected, layers, quantization
    )


def facts_for(
    rows: CacheRows, timings: Mapping[str, float] | None = None, **fingerprint: Any
) -> ManifestFacts:
    """What a build that kept these rows would say; ``fingerprint`` changes the identity."""
    identity = a_fingerprint(
        dtype=rows.dtype,
        num_layers=rows.num_layers,
        num_kv_heads=rows.num_kv_heads,
        head_dim=rows.head_dim,
        quantization=rows.quantization,
        **fingerprint,
    )
    if rows.has_remainder:
        parameters = {**identity.policy_parameters, "remainder": rows.remainder_rows}
        identity = replace(identity, policy_parameters=parameters)
    return ManifestFacts(
        fingerprint=identity,
        tokens_total=1_000_000,
        tokens_protected=4,
        ratio=rows.ratios[-1],
        ratio_achieved=rows.ratios[-1],
        policy_applied="kvzip",
        timings={"prefill_seconds": 1.25} if timings is None else timings,
        versions={"kvkeep": "0"},
    )


def prefix_of(rows: CacheRows, bands: int) -> CacheRows:
    """The rows of the first bands, cut by hand: what a load at that ratio must give."""
    counts = rows.counts[:bands]
    layers = []
    for index, layer in enumerate(rows.layers):
        kept: list[int] = []
        run_start = 0
        for head in range(rows.num_kv_heads):
            kept.extend(range(run_start, run_start + int(counts[:, index, head].sum())))
            run_start += int(rows.counts[:, index, head].sum())
        scales = layer.scales
        if scales is not None:
            of_rows = {name: getattr(scales, name) for name in SCALE_NAMES[rows.quantization]}
            scales = replace(scales, **{name: part[kept] for name, part in of_rows.items()})
        remainder = None if layer.remainder is None else layer.remainder[:bands]
        layers.append(
            LayerRows(layer.k[kept], layer.v[kept], layer.position[kept], scales, remainder)
        )
    return replace(rows, ratios=rows.ratios[:bands], counts=counts, layers=tuple(layers))


def assert_equal_rows(found: CacheRows, expected: CacheRows) -> None:
    """Bit for bit: every count, position, K, V, scale and remainder."""
    assert found.quantization == expected.quantization
    assert (found.dtype, found.num_kv_heads, found.head_dim, found.ratios) == (
        expected.dtype,
        expected.num_kv_heads,
        expected.head_dim,
        expected.ratios,
    )
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.protected, expected.protected)
    assert len(found.layers) == len(expected.layers)
    for here, there in zip(found.layers, expected.layers, strict=True):
        np.testing.assert_array_equal(here.k, there.k)
        np.testing.assert_array_equal(here.v, there.v)
        np.testing.assert_array_equal(here.position, there.position)
        assert (here.scales is None) == (there.scales is None)
        if here.scales is not None and there.scales is not None:
            means = [x.scales.k_mean for x in (here, there) if x.scales.k_mean is not None]
            pairs = [*zip(here.scales.of_rows, there.scales.of_rows, strict=True)]
            if expected.quantization == "int4":
                pairs.append((means[0], means[1]))
            for mine, other in pairs:
                np.testing.assert_array_equal(mine.view(np.uint16), other.view(np.uint16))
        assert (here.remainder is None) == (there.remainder is None)
        if here.remainder is not None and there.remainder is not None:
            np.testing.assert_array_equal(here.remainder, there.remainder, strict=True)


def _random_layer(
    rng: np.random.Generator,
    length: Int32Array,
    head_dim: int,
    dtype: CacheDtype,
    quantization: Quantization,
) -> LayerRows:
    rows = int(length.sum())
    position = [np.sort(rng.choice(10_000, n, replace=False)) for n in length.tolist()]
    if quantization != "none":
        width = row_bytes(dtype, quantization, head_dim)
        k, v = rng.integers(0, 256, (2, rows, width), dtype=np.uint8)
        k_scale, k_zero, v_scale, v_zero = rng.standard_normal((4, rows)).astype(np.float16)
        mean = rng.standard_normal((len(length), head_dim)).astype(np.float16)
        scales = LayerScales(k_scale, k_zero, v_scale, v_zero, mean)
        if quantization != "int4":
            scales = replace(scales, k_mean=None)
        if quantization == "fp8":
            scales = replace(scales, k_zero=None, v_zero=None)
            for codes in (k, v):
                codes[codes & 0x7F == 0x7F] ^= 1
        return LayerRows(k, v, np.concatenate(position).astype(np.int32), scales)
    return LayerRows(
        _random_numbers(rng, (rows, head_dim), dtype),
        _random_numbers(rng, (rows, head_dim), dtype),
        np.concatenate(position).astype(np.int32),
    )


def _random_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: CacheDtype
) -> RowBytes:
    numbers = rng.standard_normal(shape, dtype=np.float32)
    if dtype == "float32":
        return np.ascontiguousarray(numbers.view(np.uint8))
    if dtype == "float16":
        return np.ascontiguousarray(numbers.astype(np.float16).view(np.uint8))
    # bfloat16 is the upper half of a float32.
    return np.ascontiguousarray((numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
