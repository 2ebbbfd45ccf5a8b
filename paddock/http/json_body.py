"""JSON values from request bodies."""

import json
from typing import Any

import orjson

from paddock.records import ApiError, json_codec


def parse_json(data: bytes) -> Any:
    """The JSON value of a request body. Lone surrogates, which clients send when they truncate
    text inside a pair, are replaced. Raises ApiError if `data` is not JSON.

    >>> parse_json(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse_json(b'{"a": NaN}')
    Traceback (most recent call last):
    paddock.records.errors.ApiError: the body is not valid JSON: NaN is not a JSON number
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json_codec.to_json_value(json.loads(data.decode(), parse_constant=_reject_constant))
    except UnicodeDecodeError as error:
        raise ApiError(
            f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")
