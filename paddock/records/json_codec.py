"""JSON codec for records: one generic encoder and a strict decoder, driven by the dataclass fields.

A record becomes an object keyed by field name, a tuple an array: renaming a field of a record that
is exported (Trajectory, Verdict, Failure, Message, ...) changes the file format. The decoder
rejects, with the full path, an unknown key, a missing key (unless the field has a default) and a
value of the wrong type; only an integer is accepted for a float. In a union of records the keys
decide which record it is.

    >>> from paddock.records import Message
    >>> decode(Message, {"role": "user", "content": "Hi"}).content
    'Hi'
    >>> decode(Message, {"role": "user", "content": "Hi", "nmae": "Ann"})
    Traceback (most recent call last):
    paddock.records.json_codec.RecordDecodeError: Message.nmae: unknown key
    >>> decode(Message, {"role": "user", "content": 7})
    Traceback (most recent call last):
    paddock.records.json_codec.RecordDecodeError: Message.content: expected str, got 7
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from math import isfinite
from reprlib import repr as short
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

JsonObject = Mapping[str, Any]  # Any here means any JSON value

_R = TypeVar("_R", bound="DataclassInstance")
_Decoder = Callable[[Any, str], Any]  # value, path -> field value
_SCALARS = (str, int, float, bool)
_MAX_DEPTH = 100  # of nested values in `to_json_value`


class RecordDecodeError(ValueError):
    """A value does not match the record type; the message begins with its path."""


def encode(record: "DataclassInstance") -> dict[str, Any]:
    """Encode a record as JSON values; the result shares no mutable state with it."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def decode(cls: type[_R], value: object) -> _R:
    """Decode what `encode` returned. Raises RecordDecodeError with the path of a bad value."""
    return _record(cls, value, cls.__name__)


def check_json_object(value: object, path: str) -> dict[str, Any]:
    """Return a copy of `value`, which must be a mapping that JSON can represent without loss.

    Raises RecordDecodeError with the path of the offending item.
    """
    if not isinstance(value, Mapping):
        raise RecordDecodeError(f"{path}: expected a JSON object, got {short(value)}")
    return _json(value, path)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        # Fast path: token columns are long and hold scalars only.
        if set(map(type, value)) <= set(_SCALARS):
            return list(value)
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return _json(value, "")
    return encode(value) if is_dataclass(value) and not isinstance(value, type) else value


def _json(value: Any, path: str) -> Any:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_json(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if type(value) is float and not isfinite(value):
        raise RecordDecodeError(f"{path}: {value} cannot be represented in JSON")
    if value is None or type(value) in _SCALARS:
        return value
    raise RecordDecodeError(f"{path}: {short(value)} is not a JSON value")


@cache
def _decoder(hint: Any) -> _Decoder:
    """The decoder of a field annotated with `hint`."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(_record, hint)
    if hint in _SCALARS:
        return partial(_scalar, hint)
    if hint is Any:
        return _json
    if origin is Literal:
        return partial(_literal, args)
    if origin is tuple and args[1:] == (...,):
        return partial(_array, args[0])
    if origin is Mapping and args[0] is str:
        return partial(_mapping, args[1])
    if origin in (Union, UnionType):
        return partial(_union, args)
    raise TypeError(f"unsupported field type in a record: {hint}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _record(cls: type[_R], value: Any, path: str) -> _R:
    if not isinstance(value, dict):
        raise RecordDecodeError(f"{path}: expected {cls.__name__}, got {short(value)}")
    hints = _hints(cls)
    for key in value:
        if key not in hints:
            raise RecordDecodeError(f"{path}.{key}: unknown key")
    for field in fields(cls):
        if field.name not in value and field.default is field.default_factory is MISSING:
            raise RecordDecodeError(f"{path}.{field.name}: missing")
    content = {key: _decoder(hints[key])(item, f"{path}.{key}") for key, item in value.items()}
    try:
        return cls(**content)
    except ValueError as error:
        raise RecordDecodeError(f"{path}.{error}") from None


def _scalar(kind: type, value: Any, path: str) -> Any:
    if (
        kind is float and type(value) is int and abs(value) < 1 << 1023
    ):  # larger ones overflow a float
        return float(value)
    if type(value) is not kind:
        raise RecordDecodeError(f"{path}: expected {kind.__name__}, got {short(value)}")
    return value


def _literal(allowed: tuple[str, ...], value: Any, path: str) -> Any:
    if value not in allowed:
        raise RecordDecodeError(f"{path}: expected one of {', '.join(allowed)}, got {short(value)}")
    return value


def _array(hint: Any, value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise RecordDecodeError(f"{path}: expected an array, got {short(value)}")
    if hint in _SCALARS and set(map(type, value)) <= {hint}:
        return tuple(value)
    return tuple(_decoder(hint)(item, f"{path}[{i}]") for i, item in enumerate(value))


def _mapping(hint: Any, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordDecodeError(f"{path}: expected an object, got {short(value)}")
    return {key: _decoder(hint)(item, f"{path}.{key}") for key, item in value.items()}


def _union(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and NoneType in hints:
        return None
    candidates = [hint for hint in hints if hint is not NoneType]
    if len(candidates) > 1:
        keys = set(value) if isinstance(value, dict) else {""}
        candidates = [hint for hint in candidates if keys <= _hints(hint).keys()]
    if len(candidates) != 1:
        names = " or ".join(hint.__name__ for hint in hints)
        raise RecordDecodeError(f"{path}: expected {names}, got {short(value)}")
    return _decoder(candidates[0])(value, path)


def replace_lone_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can escape but UTF-8 cannot encode, by U+FFFD.

    >>> replace_lone_surrogates("\\ud83d\\ude00 \\ud800") == "\U0001f600 \ufffd"
    True
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def to_json_value(value: object) -> Any:
    """A copy of a JSON value with lone surrogates replaced in every string.

    Raises RecordDecodeError if `value` is not a JSON value or is nested too deeply.
    """
    return check_json_object({"value": _without_surrogates(value, _MAX_DEPTH)}, "value")["value"]


def _without_surrogates(value: Any, depth: int) -> Any:
    if not depth:
        raise RecordDecodeError(f"nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, dict):
        return {
            _without_surrogates(key, depth): _without_surrogates(item, depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_without_surrogates(item, depth - 1) for item in value]
    return value


def json_bytes(value: Any) -> bytes:
    """`value` as compact UTF-8 JSON.

    >>> json_bytes({"a": 10**30})
    b'{"a": 1000000000000000000000000000000}'
    """
    import orjson  # here: `paddock doctor` must run where it is broken

    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # integers beyond 64 bits, which a model may write into a tool call
        return json.dumps(value, ensure_ascii=False).encode()
