"""The base class of the config files and the types that their keys share."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, WrapValidator
from pydantic import ValidatorFunctionWrapHandler as Handler

from rungs.common.strict_json import StrictModel

_LEAST, _MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest positive normal float32, and the largest float32."""


def _not_zero(number: int) -> int:
    if number == 0:
        raise ValueError("must be at least 1, or -1 for all")
    return number


def _in_float32(number: float) -> float:
    """Reject numbers that would be infinite or 0 in float32, the dtype of steps."""
    if number and not _LEAST <= number <= _MOST:
        raise ValueError(f"must be from {_LEAST:.3g} to {_MOST:.3g}, as float32 can hold it")
    return number


def _size_or(word: str) -> WrapValidator:
    def checked(value: Any, handler: Handler) -> Any:
        """Report one error instead of one per type of the union."""
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f'must be an integer of at least 1, or "{word}"') from None

    return WrapValidator(checked)


Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Field(ge=1, le=2**62)]
CountOrAll = Annotated[
    int, Field(ge=-1, le=2**62, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)
]
AUTO: Literal["auto"] = "auto"
NEVER: Literal["never"] = "never"
SizeOrAuto = Annotated[Size | Literal["auto"], _size_or(AUTO)]
SizeOrNever = Annotated[Size | Literal["never"], _size_or(NEVER)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_in_float32)]
NotNegative = Annotated[float, Field(ge=0), AfterValidator(_in_float32)]

T = TypeVar("T")
_MAY_CHANGE = "may change"
MayChange = Annotated[T, _MAY_CHANGE]
"""The type of a key that may change when a run is resumed: it affects neither the mathematics nor
the order of the data."""


def may_change(config: type[StrictModel]) -> set[str]:
    """Return the keys of a file that may change when a run is resumed."""
    return {key for key, field in config.model_fields.items() if _MAY_CHANGE in field.metadata}


class Config(StrictModel):
    """The base class of the types of config files."""

    schema_address: MayChange[str | None] = Field(default=None, alias="$schema")
    """Path of the JSON schema of this file, for editors."""

    def with_choices(self, **values: Any) -> Self:
        """Return a copy with values chosen for the user. Their keys don't count as set by the file,
        unless they were set before."""
        chosen = self.model_copy(update=values)
        chosen.model_fields_set.intersection_update(self.model_fields_set)
        return chosen

    def as_json(self) -> dict[str, Any]:
        """Return all keys with their values, including defaults, as JSON-compatible types."""
        return self.model_dump(mode="json", exclude={"schema_address"})
