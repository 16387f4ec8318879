"""What every config file is: a strict, frozen JSON object; and the types that keys share."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rungs.common.strict_json import StrictModel


def _not_zero(number: int) -> int:
    if number == 0:
        raise ValueError("must be at least 1, or -1 for all")
    return number


Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, Field(ge=1, le=2**62)]
CountOrAll = Annotated[
    int,
    Field(ge=-1, le=2**62, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_not_zero),
]
Positive = Annotated[float, Field(gt=0)]


class Config(StrictModel):
    """What both files share."""

    schema_address: str | None = Field(default=None, alias="$schema")
    """Where editors find the JSON schema of this file."""

    def as_json(self) -> dict[str, Any]:
        """Every key with its value, defaults filled in, ready for `json.dumps`."""
        return self.model_dump(mode="json", exclude={"schema_address"})
