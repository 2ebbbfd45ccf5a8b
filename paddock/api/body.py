"""Validation of request bodies.

Unknown keys are ignored, and null means the same as an absent key. Types are strict: nothing is
converted except an integer given for a float.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from paddock.records import ApiError

_B = TypeVar("_B", bound="RequestBody")


class RequestBody(BaseModel):
    """Base class of request bodies. Its JSON schema appears in the OpenAPI document."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def parse_body(kind: type[_B], value: Any) -> _B:
    """Validate `value` as `kind`. Raises ApiError naming the first invalid field.

    >>> class Small(RequestBody):
    ...     size: int | None = None
    >>> parse_body(Small, {"size": 3, "other": "ignored"}).size
    3
    >>> parse_body(Small, {"size": "3"})
    Traceback (most recent call last):
    paddock.records.errors.ApiError: size: Input should be a valid integer
    """
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        path = f"{field}: " if field else ""
        raise ApiError(f"{path}{first['msg']}", param=field) from None
