"""Request bodies: bytes into checked fields.

Unknown keys are tolerated, and null is the same as leaving a key out. A value of another type than
the one promised is refused; nothing is converted, except a whole number given for a float.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from paddock.records import ApiError

_B = TypeVar("_B", bound="RequestBody")


class RequestBody(BaseModel):
    """The base of every request body. Its JSON schema is what the OpenAPI document shows."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def parse_body(kind: type[_B], value: Any) -> _B:
    """The body as `kind`, or an ApiError that names the first field that is wrong.

    >>> class Small(RequestBody):
    ...     size: int | None = None
    >>> parse_body(Small, {"size": 3, "other": "tolerated"}).size
    3
    >>> parse_body(Small, {"size": "3"})
    Traceback (most recent call last):
    paddock.records.errors.ApiError: size: Input should be a valid integer
    """
    if not isinstance(value, dict):
        raise ApiError("the body is not a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        path = f"{field}: " if field else ""
        raise ApiError(f"{path}{first['msg']}", param=field) from None
