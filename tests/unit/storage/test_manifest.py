import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvkeep_storage.errors import Corrupt, Incompatible, Invalid
from kvkeep_storage.fidelity import Fidelity
from kvkeep_storage.manifest import SCHEMA_VERSION, Manifest, sha256_hex
from kvkeep_storage.slab import encode_slab

from ...support.caches import facts_for, random_rows
from .test_fidelity import MEASURED


def _manifest(**rows_like: Any) -> Manifest:
    rows = random_rows(**rows_like)
    slabs = tuple(encode_slab(rows, band).digests for band in range(len(rows.ratios)))
    return Manifest.describe(rows, slabs, facts_for(rows), created_at=1.5)


def _edited(**changes: Any) -> bytes:
    content = json.loads(_manifest().encode())
    return json.dumps({**content, **changes}).encode()


def test_a_manifest_reads_back_equal_and_writes_equal_bytes() -> None:
    made = _manifest()
    read = Manifest.decode(made.encode())
    assert read == made
    assert read.encode() == made.encode()
    assert read.fingerprint.digest == made.fingerprint.digest


def test_a_manifest_says_what_was_stored() -> None:
    rows = random_rows(dtype="float16")
    slabs = tuple(encode_slab(rows, band).digests for band in range(3))
    read = Manifest.decode(Manifest.describe(rows, slabs, facts_for(rows), created_at=1.5).encode())
    np.testing.assert_array_equal(read.counts_array(), rows.counts)
    np.testing.assert_array_equal(read.protected_array(), rows.protected)
    assert tuple(entry.digests for entry in read.slabs) == slabs
    assert (read.dtype, read.row_bytes, read.ratios) == ("float16", rows.row_bytes, rows.ratios)
    assert read.fidelity is None


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_was_measured_is_read_by_those_who_know_of_it_only(quantization: str) -> None:
    rows = random_rows(quantization=quantization)
    slabs = tuple(encode_slab(rows, band).digests for band in range(len(rows.ratios)))
    facts = replace(facts_for(rows), fidelity=MEASURED)
    made = Manifest.describe(rows, slabs, facts, created_at=1.5)
    read = Manifest.decode(made.encode())
    assert read.fidelity == MEASURED
    assert read.encode() == made.encode()
    assert read.schema_version == 4
    content = json.loads(made.encode())
    content["fidelity"]["nll_full"] = -1.0
    with pytest.raises(Corrupt):
        Manifest.decode(json.dumps(content).encode())


def test_a_newer_schema_is_incompatible_not_corrupt() -> None:
    # Whatever else it holds: a newer schema may have any fields.
    newer = json.dumps({"schema_version": SCHEMA_VERSION + 1, "shape": "unknown"}).encode()
    with pytest.raises(Incompatible, match="schema_version"):
        Manifest.decode(newer)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        _manifest().encode()[:-1],
        _manifest().encode() + b"x",
        _edited(surprise=1),
        _edited(dtype="float64"),
        _edited(dtype="float16"),
        _edited(num_layers=3),
        _edited(ratios=[0.05, 0.1]),
        _edited(ratios=[0.3, 0.1, 0.05]),
        _edited(counts=[[[1, 1], [1]]]),
        _edited(counts=[[[-1, 1], [1, 1]]] * 3),
        _edited(protected=[[1, 1]]),
        _edited(slabs=[]),
        _edited(tokens_protected=2_000_000),
        _edited(fingerprint={}),
        _edited(created_at=float("nan")),
    ],
)
def test_what_no_version_writes_is_corrupt(content: bytes) -> None:
    with pytest.raises(Corrupt, match=r"^manifest"):
        Manifest.decode(content)


def test_any_flipped_bit_anywhere_changes_the_digest_in_the_record() -> None:
    content = _manifest().encode()
    chosen = random.Random(7)
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1 << chosen.randrange(8)
        assert sha256_hex(bytes(damaged)) != sha256_hex(content)


def test_rows_and_facts_of_different_models_are_refused() -> None:
    rows = random_rows()
    slabs = tuple(encode_slab(rows, band).digests for band in range(3))
    facts = facts_for(rows)
    foreign = replace(facts, fingerprint=replace(facts.fingerprint, head_dim=9))
    with pytest.raises(Invalid, match="head_dim"):
        Manifest.describe(rows, slabs, foreign, created_at=1.5)


@pytest.mark.parametrize(
    ("quantization", "version"), [("none", 1), ("int8", 2), ("int4", 2), ("fp8", 3)]
)
def test_rows_are_written_in_the_oldest_schema_that_knows_them(
    quantization: str, version: int
) -> None:
    made = _manifest(quantization=quantization)
    read = Manifest.decode(made.encode())
    assert (read.schema_version, read.quantization) == (version, quantization)
    assert read.row_bytes == {"none": 16, "int8": 8, "int4": 4, "fp8": 8}[quantization]
    content = json.loads(made.encode())
    with pytest.raises(Corrupt, match="schema_version"):
        Manifest.decode(json.dumps({**content, "schema_version": version % 3 + 1}).encode())


@pytest.mark.parametrize("fidelity", [None, MEASURED], ids=["", "measured"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_remainders_are_read_by_those_who_know_of_them_only(
    quantization: str, fidelity: Fidelity | None
) -> None:
    rows = random_rows(quantization=quantization, remainder=True)
    slabs = tuple(encode_slab(rows, band).digests for band in range(3))
    facts = replace(facts_for(rows), fidelity=fidelity)
    made = Manifest.describe(rows, slabs, facts, created_at=1.5)
    read = Manifest.decode(made.encode())
    assert read == made
    assert (read.schema_version, read.has_remainder) == (5, True)
    assert not _manifest(quantization=quantization).has_remainder
    content = json.loads(made.encode())
    for version in range(1, 5):
        with pytest.raises(Corrupt, match="schema_version"):
            Manifest.decode(json.dumps({**content, "schema_version": version}).encode())
    # Nor does the version of those who know them make any of a cache that has none.
    with pytest.raises(Corrupt, match="schema_version"):
        Manifest.decode(_edited(schema_version=5))


@pytest.mark.parametrize("built", [False, True])
def test_rows_with_remainders_that_were_not_promised_or_without_promised_ones_are_refused(
    built: bool,
) -> None:
    rows = random_rows(remainder=built)
    slabs = tuple(encode_slab(rows, band).digests for band in range(3))
    facts = facts_for(random_rows(remainder=not built))
    with pytest.raises(Invalid, match=r"^remainder: "):
        Manifest.describe(rows, slabs, facts, created_at=1.5)


@pytest.mark.parametrize("fit", [0, -1, 1.0, "1", ""])
def test_a_fit_of_remainders_that_has_no_version_is_refused(fit: str | float) -> None:
    rows = random_rows(remainder=True)
    slabs = tuple(encode_slab(rows, band).digests for band in range(3))
    facts = facts_for(rows)
    parameters = {**facts.fingerprint.policy_parameters, "remainder": fit}
    odd = replace(facts.fingerprint, policy_parameters=parameters)
    with pytest.raises(Invalid, match=r"^remainder: must be"):
        Manifest.describe(rows, slabs, replace(facts, fingerprint=odd), created_at=1.5)
    content = json.loads(Manifest.describe(rows, slabs, facts, created_at=1.5).encode())
    content["fingerprint"] = json.loads(odd.to_json())
    with pytest.raises(Corrupt, match="remainder: must be"):
        Manifest.decode(json.dumps(content).encode())


def test_rows_quantised_otherwise_than_promised_are_refused() -> None:
    rows = random_rows(quantization="int8")
    slabs = tuple(encode_slab(rows, band).digests for band in range(3))
    facts = facts_for(random_rows(quantization="int4"))
    with pytest.raises(Invalid, match="quantization"):
        Manifest.describe(rows, slabs, facts, created_at=1.5)
    unknown = replace(facts.fingerprint, quantization="int2")
    content = json.loads(_manifest().encode())
    content["fingerprint"] = json.loads(unknown.to_json())
    with pytest.raises(Corrupt, match="int2"):
        Manifest.decode(json.dumps(content).encode())


def test_a_position_behind_the_last_token_is_refused() -> None:
    rows = random_rows()
    slabs = tuple(encode_slab(rows, band).digests for band in range(3))
    last = max(int(layer.position.max()) for layer in rows.layers)
    Manifest.describe(rows, slabs, replace(facts_for(rows), tokens_total=last + 1), created_at=1.5)
    with pytest.raises(Invalid, match="position"):
        Manifest.describe(rows, slabs, replace(facts_for(rows), tokens_total=last), created_at=1.5)


@pytest.mark.parametrize(("ratio", "bands"), [(None, 3), (0.05, 1), (0.1, 2), (0.3, 3)])
def test_a_stored_ratio_gets_exactly_its_bands(ratio: float | None, bands: int) -> None:
    assert _manifest().bands(ratio) == bands


@pytest.mark.parametrize("ratio", [0.01, 0.07, 0.25, 0.31, 1.0, 0.0, -0.1])
def test_a_ratio_that_is_not_stored_is_refused(ratio: float) -> None:
    with pytest.raises(Invalid, match="ratio"):
        _manifest().bands(ratio)
