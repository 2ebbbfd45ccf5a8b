"""Arguments of tool calls: JSON that may be broken, and text that a schema gives a type."""

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from paddock.records import json_codec

RAW_ARGUMENTS_KEY = "arguments"  # the key under which arguments that are no JSON object are kept

_SCHEMA_LEVELS = 16  # that are looked into; a schema may refer to itself
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def parse_json_value(text: str) -> Any:
    """The value that JSON `text` spells, as a record can carry it; ValueError if it does not."""
    try:
        return json_codec.to_json_value(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_arguments(given: object) -> json_codec.JsonObject:
    """Arguments as clients send them: an object, or JSON text, or nothing. What is neither an
    object nor spells one is kept as text under the key RAW, so that history can be shown.

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
    """The JSON types that a tool's schema allows the argument `key`; empty if it does not say.

    >>> schema = {"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
    >>> sorted(allowed_json_types(schema, "n")), allowed_json_types(schema, "m")
    (['integer', 'null'], frozenset())
    """
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    return frozenset(_kinds(schema, parameters, _SCHEMA_LEVELS, set()))


def coerce_argument(text: str, kinds: frozenset[str]) -> tuple[Any, bool]:
    """The value of an argument written as `text`, and whether it is of a type it may have.

    Text that may only be a string is never looked into. Else it is JSON, or a Python literal where
    the schema asks for something, if that gives an allowed type; or the text itself.

    >>> coerce_argument("5", frozenset({"integer"})), coerce_argument("5", frozenset({"string"}))
    ((5, True), ('5', True))
    >>> coerce_argument("five", frozenset({"integer"}))
    ('five', False)
    >>> coerce_argument("{'a': None}", frozenset({"object"}))
    ({'a': None}, True)
    """
    others = kinds - {"string"}
    if kinds and not others:
        return text, True
    try:
        value = _spelled(text, literal=bool(kinds))
    except ValueError:
        return text, not kinds or "string" in kinds
    if not kinds or _fits(value, others):
        return value, True
    if "string" in kinds:
        return text, True
    if isinstance(value, float) and value.is_integer() and "integer" in others:
        return int(value), True
    return value, False


def _spelled(text: str, *, literal: bool) -> Any:
    """The value that `text` spells in JSON or, with `literal`, in Python."""
    try:
        return parse_json_value(text)
    except ValueError:
        if not literal:
            raise
    try:
        with warnings.catch_warnings():  # about escapes in what is no Python at all
            warnings.simplefilter("ignore")
            return json_codec.to_json_value(ast.literal_eval(text.strip()))
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("no literal") from None


def _kinds(
    schema: object, root: json_codec.JsonObject, levels: int, seen: set[int]
) -> Iterator[str]:
    """`seen` are the parts that were looked at: many that refer to each other are no more work."""
    if not isinstance(schema, Mapping) or not levels or id(schema) in seen:
        return
    seen.add(id(schema))
    said = schema.get("type")
    if said is not None:
        yield from (kind for kind in _listed(said) if isinstance(kind, str))
        return
    values = [schema["const"]] if "const" in schema else _listed(schema.get("enum", []))
    yield from (_KINDS[type(value)] for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _listed(schema.get(key, [])):
            yield from _kinds(option, root, levels - 1, seen)
    yield from _kinds(_referred(schema.get("$ref"), root), root, levels - 1, seen)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _referred(reference: object, root: json_codec.JsonObject) -> object:
    """What a reference such as "#/$defs/City" stands for."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _fits(value: object, kinds: frozenset[str]) -> bool:
    kind = _KINDS[type(value)]
    return kind in kinds or (kind == "integer" and "number" in kinds)
