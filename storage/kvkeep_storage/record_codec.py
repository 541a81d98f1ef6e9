"""How a record is written as a Redis hash, and read back; pure, no I/O.

Every value is plain text. A field that is None is absent. Floats are written so that reading
gives the same float; the numbers of a tuple are separated by commas, which a Lua script can
split; mappings are JSON.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvkeep_storage.errors import RecordCorrupt
from kvkeep_storage.fidelity import Fidelity

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

_WHOLE: Final = frozenset(
    {
        "expires_seconds",
        "tokens_document",
        "tokens_protected",
        "tokens_total",
        "tokens_asked",
        "full_bytes",
        "stored_bytes",
        "queries",
    }
)
_REAL: Final = frozenset(
    {
        "fraction",
        "created_at",
        "ready_at",
        "last_used_at",
        "expires_at",
        "committed_at",
        "refresh_requested_at",
        "ratio",
        "ratio_achieved",
        "ratio_from",
        "max_loss",
    }
)
_REALS: Final = frozenset({"ratios", "ratios_available"})
_MAPPINGS: Final = frozenset({"metadata", "timings"})
_FLAGS: Final = frozenset({"remainder"})
_TRUTH: Final = {"true": True, "false": False}


def to_hash(record: "DataclassInstance") -> dict[str, str]:
    """Every field of a record that is not None, as text."""
    return {
        item.name: encode(item.name, value)
        for item in fields(record)
        if (value := getattr(record, item.name)) is not None
    }


def encode(field: str, value: Any) -> str:
    """One value, not None, as the text that stands in the hash."""
    if field in _REALS:
        return ",".join(repr(float(item)) for item in value)
    if field in _MAPPINGS:
        return json.dumps(dict(value), ensure_ascii=False, sort_keys=True)
    if field in _REAL:
        return repr(float(value))
    if field in _FLAGS:
        return "true" if value else "false"
    if field == "fidelity":
        return str(value.to_json())
    return str(value)


def pairs(stored: Mapping[str, str]) -> list[str]:
    """A hash as the flat list of fields and values that Redis takes."""
    return [text for pair in stored.items() for text in pair]


def from_hash(cls: type[Record], kind: str, stored: Mapping[str, str]) -> Record:
    """Read what ``to_hash`` wrote; ``kind`` names the record in an error.

    Raises: RecordCorrupt for a field that is unknown, missing or not a value of its kind.
    """
    name = f"{kind} record {stored.get('id') or stored.get('cache_id')!r}"
    known = {item.name for item in fields(cls)}
    if unknown := sorted(set(stored) - known):
        raise RecordCorrupt(name, f"unknown fields {', '.join(unknown)}")
    try:
        return cls(**{field: _parse(field, text) for field, text in stored.items()})
    except (TypeError, ValueError) as error:
        raise RecordCorrupt(name, str(error)) from error


def _parse(field: str, text: str) -> Any:
    if field in _WHOLE:
        return int(text)
    if field in _REAL:
        return _finite(field, text)
    if field in _REALS:
        return tuple(_finite(field, item) for item in text.split(",") if item)
    if field in _MAPPINGS:
        return _mapping(field, text)
    if field in _FLAGS:
        return _flag(field, text)
    if field == "fidelity":
        return Fidelity.from_json(text)
    return text


def _finite(field: str, text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{field} is {text}")
    return value


def _flag(field: str, text: str) -> bool:
    if text not in _TRUTH:
        raise ValueError(f"{field} is {text!r}, not true or false")
    return _TRUTH[text]


def _mapping(field: str, text: str) -> dict[str, Any]:
    value = json.loads(text)
    wanted = str if field == "metadata" else (int, float)
    if not isinstance(value, dict) or not all(isinstance(item, wanted) for item in value.values()):
        raise ValueError(f"{field} is not a mapping of names to values")
    return value
