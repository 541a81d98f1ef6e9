"""Numbers with bounds, in settings and requests: out of them, a message tells the whole range."""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_OUT_OF_BOUNDS: Final = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Annotates an ``int`` or a ``float`` of a pydantic model: from ``low`` to ``high``, both in.

    ``high`` None is any number; with ``is_above`` the number must be above ``low``. The JSON
    schema has them as ``Field`` would write them.
    """

    low: float
    high: float | None = None
    is_above: bool = False

    def __str__(self) -> str:
        """Say what is accepted, in words that follow "must be"."""
        if self.high is None:
            return f"above {self.low}" if self.is_above else f"at least {self.low}"
        if self.is_above:
            return f"above {self.low} and at most {self.high}"
        return f"from {self.low} to {self.high}"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check a number as pydantic does, and reword what it says of one bound."""
        number: Any = handler(source)
        number["gt" if self.is_above else "ge"] = self.low
        if self.high is not None:
            number["le"] = self.high
        return core_schema.no_info_wrap_validator_function(self._check, number)

    def _check(self, value: object, check: ValidatorFunctionWrapHandler) -> object:
        try:
            return check(value)
        except ValidationError as error:
            if error.errors()[0]["type"] not in _OUT_OF_BOUNDS:
                raise
            raise PydanticCustomError("out_of_bounds", f"must be {self}") from error
