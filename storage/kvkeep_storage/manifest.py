"""The manifest of one generation: what was stored, and how every byte of it is recognised.

Its own sha256 stands in the cache record, so that a manifest cannot change unseen either.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from kvkeep_storage.artifact import (
    CacheDtype,
    CacheRows,
    Int32Array,
    Quantization,
    check_ratios,
    row_bytes,
)
from kvkeep_storage.errors import Corrupt, Incompatible, Invalid
from kvkeep_storage.fidelity import Fidelity
from kvkeep_storage.fingerprint import Fingerprint
from kvkeep_storage.slab import SlabDigests

SCHEMA_VERSIONS: dict[Quantization, int] = {"none": 1, "int8": 2, "int4": 2, "fp8": 3}
"""What a cache is written as: the first that knew its kind of rows. So whoever could read it
before still can, and whoever cannot says that it is incompatible."""
SCHEMA_VERSION = 5
"""The newest that is known."""
_WITH_FIDELITY = 4
"""What a cache of any rows is written as when what it loses was measured."""
_WITH_REMAINDER = 5
"""What a cache of any rows is written as when it has remainders, measured or not."""

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
_HeadCounts = tuple[tuple[_Count, ...], ...]


def _read_fingerprint(value: object) -> Fingerprint:
    return value if isinstance(value, Fingerprint) else Fingerprint.from_json(json.dumps(value))


def _write_fingerprint(value: Fingerprint) -> dict[str, object]:
    content: dict[str, object] = json.loads(value.to_json())
    return content


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """What a build knows about its cache beyond the rows.

    ``ratio`` is the kept fraction asked for, ``ratio_achieved`` the measured one. ``timings``
    are seconds by stage; ``versions`` are package versions by name.
    """

    fingerprint: Fingerprint
    tokens_total: int
    tokens_protected: int
    ratio: float
    ratio_achieved: float
    policy_applied: str
    timings: Mapping[str, float]
    versions: Mapping[str, str]
    fidelity: Fidelity | None = None


class SlabEntry(BaseModel):
    """One slab's size and digests; see ``SlabDigests``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size_bytes: Annotated[int, Field(gt=0)]
    header_bytes: Annotated[int, Field(gt=8)]
    header_digest: _Digest
    layer_digests: tuple[_Digest, ...]

    @property
    def digests(self) -> SlabDigests:
        """The same facts as a plain value."""
        return SlabDigests(
            self.size_bytes, self.header_bytes, self.header_digest, self.layer_digests
        )


class Manifest(BaseModel):
    """Everything a reader must know to trust and use one generation of a cache.

    ``counts`` is [bands][layers][heads], the rows each band adds; ``protected`` is
    [layers][heads]. ``slabs[i]`` describes band i. ``fidelity`` is None where nothing was measured.
    Whether the rows have remainders is for the fingerprint to say.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: int
    fingerprint: Annotated[
        Fingerprint, PlainValidator(_read_fingerprint), PlainSerializer(_write_fingerprint)
    ]
    tokens_total: _Count
    tokens_protected: _Count
    dtype: CacheDtype
    num_layers: Annotated[int, Field(ge=1)]
    num_kv_heads: Annotated[int, Field(ge=1)]
    head_dim: Annotated[int, Field(ge=1)]
    ratios: tuple[float, ...]
    counts: tuple[_HeadCounts, ...]
    protected: _HeadCounts
    slabs: tuple[SlabEntry, ...]
    ratio: Annotated[float, Field(gt=0, le=1)]
    ratio_achieved: Annotated[float, Field(ge=0, le=1)]
    policy_applied: str
    timings: dict[str, float]
    versions: dict[str, str]
    created_at: float
    fidelity: Fidelity | None = None

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        check_ratios(self.ratios)
        bands, shape = len(self.ratios), (self.num_layers, self.num_kv_heads)
        if self.counts_array().shape != (bands, *shape) or len(self.slabs) != bands:
            raise Invalid("counts, slabs", f"{bands} bands of {shape} expected")
        if _head_counts(self.protected).shape != shape:
            raise Invalid("protected", f"{shape} expected")
        if any(len(slab.layer_digests) != self.num_layers for slab in self.slabs):
            raise Invalid("slabs", f"{self.num_layers} layer digests expected in each")
        _check_identity(self)
        row_bytes(self.dtype, self.quantization, self.head_dim)
        if self.schema_version != _schema_version(self.fingerprint, self.fidelity):
            raise Invalid("schema_version", f"not the one of {self.quantization!r} rows")
        return self

    @classmethod
    def describe(
        cls,
        rows: CacheRows,
        slabs: tuple[SlabDigests, ...],
        facts: ManifestFacts,
        *,
        created_at: float,
    ) -> Self:
        """Describe encoded rows. Raises: Invalid when rows and facts disagree."""
        if rows.quantization != facts.fingerprint.quantization:
            wanted = facts.fingerprint.quantization
            raise Invalid("quantization", f"rows of {rows.quantization!r}, {wanted!r} was promised")
        if rows.remainder_rows != (promised := _remainder_rows(facts.fingerprint)):
            raise Invalid("remainder", f"{rows.remainder_rows} rows, {promised} were promised")
        for index, layer in enumerate(rows.layers):
            if (layer.position >= facts.tokens_total).any():
                name = f"layers.{index:03d}.position"
                raise Invalid(name, f"must be below tokens_total={facts.tokens_total}")
        content: dict[str, object] = {
            "schema_version": _schema_version(facts.fingerprint, facts.fidelity),
            "fingerprint": facts.fingerprint,
            "tokens_total": facts.tokens_total,
            "tokens_protected": facts.tokens_protected,
            "dtype": rows.dtype,
            "num_layers": rows.num_layers,
            "num_kv_heads": rows.num_kv_heads,
            "head_dim": rows.head_dim,
            "ratios": rows.ratios,
            "counts": rows.counts.tolist(),
            "protected": rows.protected.tolist(),
            "slabs": tuple(
                SlabEntry(
                    size_bytes=slab.size_bytes,
                    header_bytes=slab.header_bytes,
                    header_digest=slab.header_digest,
                    layer_digests=slab.layer_digests,
                )
                for slab in slabs
            ),
            "ratio": facts.ratio,
            "ratio_achieved": facts.ratio_achieved,
            "policy_applied": facts.policy_applied,
            "timings": dict(facts.timings),
            "versions": dict(facts.versions),
            "created_at": created_at,
            "fidelity": facts.fidelity,
        }
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise Invalid("manifest", str(error)) from error

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Read a stored manifest whose sha256 has matched its record.

        Raises: Incompatible for a schema this version does not know; Corrupt for
        anything that ``encode`` cannot have written.
        """
        try:
            version = _SchemaOnly.model_validate_json(content).schema_version
        except ValidationError as error:
            raise Corrupt("manifest", "not JSON with a schema_version") from error
        if version > SCHEMA_VERSION:
            raise Incompatible("schema_version", str(version), f"{SCHEMA_VERSION} or older")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise Corrupt("manifest", str(error)) from error

    def encode(self) -> bytes:
        """Write the manifest as JSON; equal manifests give equal bytes."""
        return self.model_dump_json(indent=1).encode()

    @property
    def row_bytes(self) -> int:
        """Size of one row's K, and of its V, without their scales."""
        return row_bytes(self.dtype, self.quantization, self.head_dim)

    @property
    def plain_row_bytes(self) -> int:
        """Size of one row's K, and of its V, in the model's dtype."""
        return row_bytes(self.dtype, "none", self.head_dim)

    @property
    def has_remainder(self) -> bool:
        """Whether every band has remainders. Raises: as ``remainder_rows``."""
        return self.remainder_rows > 0

    @property
    def remainder_rows(self) -> int:
        """Rows of each head's remainder, 0 without. Raises: Invalid for what is no number."""
        return _remainder_rows(self.fingerprint)

    @property
    def quantization(self) -> Quantization:
        """How its rows are kept. Raises: Invalid for a way that is not known."""
        return _quantization(self.fingerprint)

    def counts_array(self) -> Int32Array:
        """Rows each band adds: int32 [bands, layers, heads]."""
        return _head_counts(self.counts)

    def protected_array(self) -> Int32Array:
        """Protected rows: int32 [layers, heads]."""
        return _head_counts(self.protected)

    def bands(self, ratio: float | None) -> int:
        """How many bands give exactly ``ratio``; None is all of them.

        Raises: Invalid when the cache is not cut there.
        """
        if ratio is None:
            return len(self.ratios)
        if ratio not in self.ratios:
            raise Invalid("ratio", f"{ratio} is not stored; the cache is cut at {self.ratios}")
        return self.ratios.index(ratio) + 1


def sha256_hex(content: bytes) -> str:
    """The digest that a cache record keeps of its manifest: sha256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _quantization(fingerprint: Fingerprint) -> Quantization:
    match fingerprint.quantization:
        case "none" | "int8" | "int4" | "fp8" as known:
            return known
        case unknown:
            raise Invalid("quantization", f"{unknown!r} is not known")


def _remainder_rows(fingerprint: Fingerprint) -> int:
    """The policy's parameters say how many rows stand for the evicted ones of a head."""
    match fingerprint.policy_parameters.get("remainder"):
        case None:
            return 0
        case int(rows) if rows >= 1:
            return rows
        case unknown:
            raise Invalid("remainder", f"must be a number of rows, not {unknown!r}")


def _schema_version(fingerprint: Fingerprint, fidelity: Fidelity | None) -> int:
    if _remainder_rows(fingerprint):
        return _WITH_REMAINDER
    return SCHEMA_VERSIONS[_quantization(fingerprint)] if fidelity is None else _WITH_FIDELITY


class _SchemaOnly(BaseModel):
    schema_version: int


def _head_counts(counts: object) -> Int32Array:
    """Turn nested counts into an array. Raises: Invalid when they are ragged."""
    try:
        return np.array(counts, dtype=np.int32)
    except ValueError as error:
        raise Invalid("counts, protected", "every layer has the same heads") from error


def _check_identity(manifest: Manifest) -> None:
    """A manifest must not disagree with its own fingerprint, whose digest names the cache."""
    fingerprint = manifest.fingerprint
    pairs = (
        ("dtype", manifest.dtype, fingerprint.dtype),
        ("num_layers", manifest.num_layers, fingerprint.num_layers),
        ("num_kv_heads", manifest.num_kv_heads, fingerprint.num_kv_heads),
        ("head_dim", manifest.head_dim, fingerprint.head_dim),
    )
    for name, here, there in pairs:
        if here != there:
            raise Invalid(name, f"{here!r} stored, {there!r} in the fingerprint")
    if manifest.tokens_protected > manifest.tokens_total:
        raise Invalid("tokens_protected", "at most tokens_total")
