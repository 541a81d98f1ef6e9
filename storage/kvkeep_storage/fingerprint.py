"""The identity of a cache: everything that may change an answer, and nothing else.

``ratio`` is left out on purpose: rows are stored in order of importance, so one artifact
serves every ratio up to the one it was built at.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

FINGERPRINT_SCHEMA_VERSION = 1

Parameter = str | int | float


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The part of a fingerprint that a loaded model decides; a cache of another one is useless.

    The fields mean what they mean in ``Fingerprint``.
    """

    model: str
    weights_digest: str
    tokenizer_digest: str
    dtype: str
    rope: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    adapter_digest: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identifies a cache; two equal fingerprints may share one artifact.

    ``protected`` holds half-open token spans, ascending and apart. ``dtype`` is the resolved
    one, never "auto". ``rope`` describes the rotary configuration, pinned factors included.
    ``adapter_digest`` is empty when no adapter is loaded. ``tenant_salt`` keeps tenants apart
    and is never empty.

    Raises: ValueError, naming the field.
    """

    model: str
    weights_digest: str
    tokenizer_digest: str
    prefix_text: str
    dtype: str
    rope: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    token_ids_digest: str
    protected: tuple[tuple[int, int], ...]
    policy: str
    policy_version: int
    policy_parameters: Mapping[str, Parameter] = field(hash=False)
    quantization: str
    adapter_digest: str
    tenant_salt: str

    def __post_init__(self) -> None:
        """Check every field and freeze the parameters, sorted by name."""
        for name in _TEXT_FIELDS:
            _check_text(name, getattr(self, name), may_be_empty=name in _MAY_BE_EMPTY)
        for name in _COUNT_FIELDS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"fingerprint.{name} must be a whole number >= 1, not {value!r}")
        spans = tuple((start, end) for start, end in self.protected)
        _check_spans(spans)
        object.__setattr__(self, "protected", spans)
        parameters = {name: self.policy_parameters[name] for name in sorted(self.policy_parameters)}
        for name, parameter in parameters.items():
            _check_parameter(name, parameter)
        object.__setattr__(self, "policy_parameters", MappingProxyType(parameters))

    @property
    def digest(self) -> str:
        """The cache id: sha256, 64 hexadecimal digits, over tagged, length-prefixed fields."""
        sha = hashlib.sha256()
        for part in self._parts():
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part)
        return sha.hexdigest()

    @property
    def model_identity(self) -> ModelIdentity:
        """The model this cache was built with, and how it was loaded."""
        names = (item.name for item in fields(ModelIdentity))
        return ModelIdentity(**{name: getattr(self, name) for name in names})

    def to_json(self) -> str:
        """Write every field as one JSON object with sorted keys; ``from_json`` reads it back."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content["policy_parameters"] = dict(self.policy_parameters)
        return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Fingerprint":
        """Read what ``to_json`` wrote. Raises: ValueError on a missing, extra or bad field."""
        content = json.loads(text)
        names = {item.name for item in fields(cls)}
        if not isinstance(content, dict) or content.keys() != names:
            raise ValueError("fingerprint: the JSON does not hold exactly the known fields")
        return cls(**_without_json_types(content))

    def _parts(self) -> Iterator[bytes]:
        """Yield tag, type and value of every field, so that no two fields can run together."""
        yield from (b"schema_version", *_value_parts(FINGERPRINT_SCHEMA_VERSION))
        for item in fields(self):
            yield item.name.encode()
            value = getattr(self, item.name)
            if item.name == "protected":
                yield from (b"n", str(len(value)).encode())
                for start, end in value:
                    yield from (str(start).encode(), str(end).encode())
            elif item.name == "policy_parameters":
                yield from (b"n", str(len(value)).encode())
                for name, parameter in value.items():
                    yield from (name.encode(), *_value_parts(parameter))
            else:
                yield from _value_parts(value)


_MAY_BE_EMPTY = frozenset({"prefix_text", "rope", "adapter_digest"})
_TEXT_FIELDS = (
    "model",
    "weights_digest",
    "tokenizer_digest",
    "prefix_text",
    "dtype",
    "rope",
    "token_ids_digest",
    "policy",
    "quantization",
    "adapter_digest",
    "tenant_salt",
)
_COUNT_FIELDS = ("num_layers", "num_kv_heads", "head_dim", "policy_version")


def digest_token_ids(ids: Sequence[int]) -> str:
    """Digest token ids: sha256, hexadecimal, over their count and 8 little-endian bytes each.

    Raises: ValueError when an id is negative or not a whole number.
    """
    try:
        packed = struct.pack(f"<{len(ids) + 1}Q", len(ids), *ids)
    except struct.error as error:
        raise ValueError("token ids must be whole numbers >= 0") from error
    return hashlib.sha256(packed).hexdigest()


def _value_parts(value: Parameter) -> tuple[bytes, bytes]:
    """Type and text of one value: 1, 1.0 and "1" are three different values."""
    if isinstance(value, float):
        return b"f", value.hex().encode()
    if isinstance(value, int):
        return b"i", str(value).encode()
    return b"s", value.encode()


def _check_text(name: str, value: object, *, may_be_empty: bool) -> None:
    if not isinstance(value, str) or not (value or may_be_empty):
        wanted = "text" if may_be_empty else "text, and not empty"
        raise ValueError(f"fingerprint.{name} must be {wanted}; it is {value!r}")


def _check_spans(spans: tuple[tuple[int, int], ...]) -> None:
    end_before = 0
    for start, end in spans:
        if type(start) is not int or type(end) is not int or not end_before <= start < end:
            raise ValueError(
                "fingerprint.protected must hold ascending half-open spans that do not"
                f" overlap; [{start!r}, {end!r}) breaks that"
            )
        end_before = end


def _check_parameter(name: object, value: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"fingerprint.policy_parameters: name {name!r} is not text")
    if type(value) not in (str, int, float):
        raise ValueError(f"fingerprint.policy_parameters.{name} has type {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"fingerprint.policy_parameters.{name} must be finite, not {value!r}")


def _without_json_types(content: dict[str, Any]) -> dict[str, Any]:
    """Turn JSON's lists back into spans. Raises: ValueError when they are not pairs."""
    spans, parameters = content["protected"], content["policy_parameters"]
    are_pairs = isinstance(spans, list) and all(isinstance(s, list) and len(s) == 2 for s in spans)
    if not are_pairs or not isinstance(parameters, dict):
        raise ValueError("fingerprint: protected holds [start, end] pairs, policy_parameters names")
    return {**content, "protected": tuple((start, end) for start, end in spans)}
