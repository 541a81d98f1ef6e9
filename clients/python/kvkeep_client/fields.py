"""JSON objects from the server, read field by field with a type each."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from kvkeep_client.errors import UnexpectedResponse


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object. Fields nobody asks for are let through: the server may be newer.

    Every reader raises UnexpectedResponse, naming the field, when it is missing or of another
    type; the ``…_or_none`` readers take a missing field for null.
    """

    values: Mapping[str, object]
    name: str

    @classmethod
    def of(cls, value: object, name: str) -> "Fields":
        """Take a decoded JSON value that must be an object; ``name`` is for messages."""
        if not isinstance(value, Mapping):
            raise UnexpectedResponse(f"{name}: expected a JSON object, got {_kind(value)}")
        return cls(value, name)

    def text(self, key: str) -> str:
        """Read a string."""
        value = self._required(key)
        if isinstance(value, str):
            return value
        raise self._wrong(key, "a string", value)

    def text_or_none(self, key: str) -> str | None:
        """Read a string or null."""
        return None if self.values.get(key) is None else self.text(key)

    def integer(self, key: str) -> int:
        """Read a whole number."""
        value = self._required(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._wrong(key, "a whole number", value)

    def integer_or_none(self, key: str) -> int | None:
        """Read a whole number or null."""
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """Read a number."""
        value = self._required(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise self._wrong(key, "a number", value)

    def number_or_none(self, key: str) -> float | None:
        """Read a number or null."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """Read true or false."""
        value = self._required(key)
        if isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false", value)

    def time(self, key: str) -> datetime:
        """Read an RFC 3339 time."""
        text = self.text(key)
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise self._wrong(key, "an RFC 3339 time", text) from error

    def time_or_none(self, key: str) -> datetime | None:
        """Read an RFC 3339 time or null."""
        return None if self.values.get(key) is None else self.time(key)

    def inner(self, key: str) -> "Fields":
        """Read a JSON object."""
        return Fields.of(self._required(key), f"{self.name}.{key}")

    def inner_or_none(self, key: str) -> "Fields | None":
        """Read a JSON object or null."""
        return None if self.values.get(key) is None else self.inner(key)

    def inners(self, key: str) -> "list[Fields]":
        """Read an array of JSON objects."""
        return [
            Fields.of(item, f"{self.name}.{key}[{index}]")
            for index, item in enumerate(self._array(key))
        ]

    def integers_or_none(self, key: str) -> tuple[int, ...] | None:
        """Read an array of whole numbers or null."""
        if self.values.get(key) is None:
            return None
        items = self._array(key)
        whole = tuple(item for item in items if isinstance(item, int))
        if len(whole) == len(items):
            return whole
        raise self._wrong(key, "an array of whole numbers", items)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read an array of numbers."""
        items = self._array(key)
        numbers = tuple(float(item) for item in items if isinstance(item, int | float))
        if len(numbers) == len(items):
            return numbers
        raise self._wrong(key, "an array of numbers", items)

    def _array(self, key: str) -> list[object]:
        value = self._required(key)
        if isinstance(value, list):
            return value
        raise self._wrong(key, "an array", value)

    def _required(self, key: str) -> object:
        if key in self.values:
            return self.values[key]
        raise UnexpectedResponse(f"{self.name}.{key} is missing from the server's answer")

    def _wrong(self, key: str, wanted: str, value: object) -> UnexpectedResponse:
        return UnexpectedResponse(f"{self.name}.{key}: expected {wanted}, got {_kind(value)}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
