"""What every request model shares: strictness, plain refusals, and text that is Unicode.

The line below a field is its description in ``/openapi.json``.
"""

import json
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    JsonValue,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from kvkeep_service.errors import InvalidEncoding, InvalidRequest

T = TypeVar("T")

WAIT_SECONDS_MAX: Final = 300
"""The longest that a request may be held until its context is ready."""

# More than any document of many parts and spans needs; each value costs time on the event loop.
_VALUES_MAX: Final = 50_000
DEPTH_MAX: Final = 100
"""How deep a field may be nested; what reads it further on goes into it level by level."""
_REFUSALS_MAX: Final = 20

# Pydantic speaks Python here; whoever sends JSON need not.
_REASONS: Final[Mapping[str, str]] = {
    "extra_forbidden": "there is no such field",
    "dict_type": "must be a JSON object",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "list_type": "must be a JSON array",
    "missing": "is missing",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
}
_BEGINNINGS: Final[Mapping[str, str]] = {
    "Input should be a valid number": "must be a number",
    "Input should be": "must be",
    "String should have": "must have",
    "List should have": "must have",
    "Dictionary should have": "must have",
}


def in_words(kind: str, message: str) -> str:
    """What pydantic says of a value, as the end of a sentence that begins with the field."""
    if kind in _REASONS:
        return _REASONS[kind]
    for beginning, ours in _BEGINNINGS.items():
        if message.startswith(beginning):
            return ours + message.removeprefix(beginning).replace(" after validation", "")
    return message


def only(*supported: object) -> AfterValidator:
    """Make a validator for a field of the contract that this version serves in part.

    It refuses every other value, and does not repeat it: it may be a conversation.
    """
    allowed = " or ".join(json.dumps(value) for value in supported)

    def check(value: T) -> T:
        if value not in supported:
            raise PydanticCustomError(
                "unsupported",
                "this is not supported by this version; leave it out or send {supported}",
                {"supported": allowed},
            )
        return value

    return AfterValidator(check)


class Strict(BaseModel):
    """Part of a request body: unknown fields and values of another JSON type are refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Body(Strict):
    """A whole request body.

    Raises: InvalidEncoding, for text that is not Unicode; InvalidRequest, for more values than a
        request can need. Of many wrong fields the first are named.
    """

    # Fields that stand elsewhere, by their names: what to say when one is sent at the top.
    elsewhere: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _speak_json(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            refusals = [cls._reworded(item) for item in error.errors()[:_REFUSALS_MAX]]
            raise ValidationError.from_exception_data(cls.__name__, refusals) from error

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, value: object) -> object:
        check_values(value)
        return value

    @classmethod
    def _reworded(cls, item: ErrorDetails) -> InitErrorDetails:
        kind, location = item["type"], item["loc"]
        reason = in_words(kind, item["msg"])
        if kind == "extra_forbidden" and len(location) == 1 and location[0] in cls.elsewhere:
            reason = f"{reason}: {cls.elsewhere[str(location[0])]}"
        said = PydanticCustomError(kind, reason)
        return InitErrorDetails(type=said, loc=location, input=item["input"])


def check_values(body: object) -> None:
    r"""Refuse lone surrogates (``\ud800``) anywhere in parsed JSON, names of fields included.

    Python keeps them in a string, and UTF-8 cannot: they would break the first write.
    Raises: InvalidEncoding, naming the field; InvalidRequest for more than 50,000 values, and
        for a field that is nested more than 100 deep.
    """
    waiting: list[tuple[str, object, int]] = [("", body, 0)]
    num_values = 0
    while waiting:
        num_values += 1
        if num_values + len(waiting) > _VALUES_MAX:
            raise InvalidRequest("body", f"has more than {_VALUES_MAX} values")
        path, value, depth = waiting.pop()
        match value:
            case str():
                if not _is_text(value):
                    raise InvalidEncoding(path or "body", "a lone surrogate is not text")
            case list() | dict() if depth > DEPTH_MAX:
                # Its whole path would be as long as it is deep.
                field = path.partition(".")[0]
                raise InvalidRequest(field, f"is nested more than {DEPTH_MAX} deep")
            case list() | dict() if len(value) > _VALUES_MAX:
                raise InvalidRequest(path or "body", f"has more than {_VALUES_MAX} values")
            case list():
                waiting += [
                    (f"{path}.{index}", item, depth + 1) for index, item in enumerate(value)
                ]
            case dict():
                for key, item in value.items():
                    if not _is_text(key):
                        raise InvalidEncoding(path or "body", "the name of a field is not text")
                    waiting.append((f"{path}.{key}".lstrip("."), item, depth + 1))


def _check_finite(value: object) -> object:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case float() as number if not math.isfinite(number):
                raise PydanticCustomError("finite_number", "must hold finite numbers only")
            case list() as items:
                waiting += items
            case dict() as fields:
                waiting += fields.values()
    return value


# Not left to ``allow_inf_nan``: pydantic forgets it for free JSON where a model is part of
# something else, as FastAPI makes it.
FreeJson = Annotated[JsonValue, BeforeValidator(_check_finite)]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
