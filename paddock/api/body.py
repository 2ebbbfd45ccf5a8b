"""Request bodies: bytes into checked fields.

Unknown keys are tolerated, and null is the same as leaving a key out. A value of another type than
the one promised is refused; nothing is converted, except a whole number given for a float.
"""

import json
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from paddock.api.errors import ApiError
from paddock.text import to_json_value

_B = TypeVar("_B", bound="RequestBody")


class RequestBody(BaseModel):
    """The base of every request body. Its JSON schema is what the OpenAPI document shows."""

    model_config = ConfigDict(
        extra="allow", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


def parse_json(data: bytes) -> Any:
    """The value that a body spells. Halves of surrogate pairs, which some clients send when they
    cut a text, are mended.

    >>> parse_json(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse_json(b'{"a": NaN}')
    Traceback (most recent call last):
    paddock.api.errors.ApiError: the body is not JSON: NaN is no JSON number
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return to_json_value(json.loads(data.decode(), parse_constant=_refuse))
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def parse_body(kind: type[_B], value: Any) -> _B:
    """The body as `kind`, or an ApiError that names the first field that is wrong.

    >>> class Small(RequestBody):
    ...     size: int | None = None
    >>> parse_body(Small, {"size": 3, "other": "tolerated"}).size
    3
    >>> parse_body(Small, {"size": "3"})
    Traceback (most recent call last):
    paddock.api.errors.ApiError: size: Input should be a valid integer
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
