"""Tool-call arguments: lenient JSON parsing, and types from a JSON schema."""

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from paddock.records import json_codec

RAW_ARGUMENTS_KEY = "arguments"  # key for arguments that are not a JSON object

_MAX_SCHEMA_DEPTH = 16  # a schema may refer to itself
_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def parse_json_value(text: str) -> Any:
    """The JSON value of `text`, with lone surrogates replaced. Raises ValueError if invalid."""
    try:
        return json_codec.to_json_value(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_arguments(given: object) -> json_codec.JsonObject:
    """Arguments as clients send them: an object, JSON text, or nothing. Anything else is kept as
    text under RAW_ARGUMENTS_KEY, so that invalid calls in the history can be rendered.

    >>> parse_arguments('{"city": "Oslo"}'), parse_arguments(""), parse_arguments('{"city": ')
    ({'city': 'Oslo'}, {}, {'arguments': '{"city": '})
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        value = (
            parse_json_value(given) if isinstance(given, str) else json_codec.to_json_value(given)
        )
    except ValueError:
        return {
            RAW_ARGUMENTS_KEY: json_codec.replace_lone_surrogates(
                given if isinstance(given, str) else str(given)
            )
        }
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    return {
        RAW_ARGUMENTS_KEY: json_codec.replace_lone_surrogates(given)
        if isinstance(given, str)
        else json.dumps(value)
    }


# --- types from a schema --------------------------------------------------------------------------


def allowed_json_types(parameters: json_codec.JsonObject, key: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows for the argument `key`; empty if unspecified.

    >>> schema = {"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
    >>> sorted(allowed_json_types(schema, "n")), allowed_json_types(schema, "m")
    (['integer', 'null'], frozenset())
    """
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    return frozenset(_schema_types(schema, parameters, _MAX_SCHEMA_DEPTH, set()))


def coerce_argument(text: str, types: frozenset[str]) -> tuple[Any, bool]:
    """The value of an argument written as `text`, and whether its type is allowed.

    If only strings are allowed, the text is the value. Otherwise it is parsed as JSON or, if the
    schema names types, as a Python literal; if that gives no allowed type, the text is the value.

    >>> coerce_argument("5", frozenset({"integer"})), coerce_argument("5", frozenset({"string"}))
    ((5, True), ('5', True))
    >>> coerce_argument("five", frozenset({"integer"}))
    ('five', False)
    >>> coerce_argument("{'a': None}", frozenset({"object"}))
    ({'a': None}, True)
    """
    others = types - {"string"}
    if types and not others:
        return text, True
    try:
        value = _parse_literal(text, literal=bool(types))
    except ValueError:
        return text, not types or "string" in types
    if not types or _fits(value, others):
        return value, True
    if "string" in types:
        return text, True
    if isinstance(value, float) and value.is_integer() and "integer" in others:
        return int(value), True
    return value, False


def _parse_literal(text: str, *, literal: bool) -> Any:
    """The value of `text` as JSON or, with `literal`, as a Python literal."""
    try:
        return parse_json_value(text)
    except ValueError:
        if not literal:
            raise
    try:
        with warnings.catch_warnings():  # invalid escapes in text that is not Python
            warnings.simplefilter("ignore")
            return json_codec.to_json_value(ast.literal_eval(text.strip()))
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("not a literal") from None


def _schema_types(
    schema: object, root: json_codec.JsonObject, depth: int, seen: set[int]
) -> Iterator[str]:
    """`seen` holds visited subschemas, so that mutual references stay linear."""
    if not isinstance(schema, Mapping) or not depth or id(schema) in seen:
        return
    seen.add(id(schema))
    declared = schema.get("type")
    if declared is not None:
        yield from (type_name for type_name in _as_list(declared) if isinstance(type_name, str))
        return
    values = [schema["const"]] if "const" in schema else _as_list(schema.get("enum", []))
    yield from (_JSON_TYPES[type(value)] for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _as_list(schema.get(key, [])):
            yield from _schema_types(option, root, depth - 1, seen)
    yield from _schema_types(_resolve_reference(schema.get("$ref"), root), root, depth - 1, seen)


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _resolve_reference(reference: object, root: json_codec.JsonObject) -> object:
    """The target of a reference such as "#/$defs/City"."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _fits(value: object, types: frozenset[str]) -> bool:
    type_name = _JSON_TYPES[type(value)]
    return type_name in types or (type_name == "integer" and "number" in types)
