"""JSON values against JSON schemas: the part of the standard that tools and answers use."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_CHECKED = {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "items"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "anyOf"),
}
_SAID_ONLY = {"title", "description", "default", "examples", "$schema", "$id", "format"}


def unsupported_keywords(schema: Any) -> list[str]:
    """The keywords of a schema that are not checked here, so that whoever relies on them is told.

    >>> unsupported_keywords({"type": "array", "items": {"oneOf": []}})
    ['oneOf']
    """
    if not isinstance(schema, Mapping):
        return []
    found = [word for word in schema if word not in _CHECKED | _SAID_ONLY]
    below = [*_values(schema.get("properties")), *schema.get("anyOf", ()), schema.get("items")]
    below.append(schema.get("additionalProperties"))
    return found + [word for inner in below for word in unsupported_keywords(inner)]


def find_violation(value: Any, schema: Any, where: str) -> str | None:
    """What is wrong with a value, its place named from `where` on; None: nothing.

    >>> find_violation({"n": [1, "2"]}, {"properties": {"n": {"items": {"type": "integer"}}}}, "it")
    "it.n[1] is '2', not of type integer"
    """
    return next(_complaints(value, schema, where), None)


def _complaints(value: Any, schema: Any, where: str) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    yield from _of_kind(value, schema, where)
    if isinstance(value, dict):
        yield from _of_object(value, schema, where)
    elif isinstance(value, list):
        yield from _of_size(len(value), schema, where, "Items")
        for place, entry in enumerate(value):
            yield from _complaints(entry, schema.get("items"), f"{where}[{place}]")
    elif isinstance(value, str):
        yield from _of_size(len(value), schema, where, "Length")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and not re.search(pattern, value):
            yield f"{where} is {value!r}, which does not match {pattern}"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _of_bounds(value, schema, where)


def _of_kind(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(wanted or [])
    kinds = tuple(kind for name in names for kind in _TYPES.get(name, ()))
    # To Python True is an int; to JSON it is not.
    is_flag = isinstance(value, bool) and bool not in kinds
    if kinds and (is_flag or not isinstance(value, kinds)):
        yield f"{where} is {value!r}, not of type {' or '.join(names)}"
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        yield f"{where} is {value!r}, none of {', '.join(map(str, choices))}"
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r}, not {schema['const']!r}"
    options = schema.get("anyOf")
    if isinstance(options, list) and all(find_violation(value, one, where) for one in options):
        yield f"{where} is {value!r}, which no alternative allows"


def _of_object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties")
    known = known if isinstance(known, Mapping) else {}
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is missing"
    more = schema.get("additionalProperties", True)
    for name, entry in value.items():
        if name not in known and more is False:
            yield f"{where}.{name} is not asked for"
        yield from _complaints(entry, known.get(name, more), f"{where}.{name}")


def _of_size(count: int, schema: Mapping[str, Any], where: str, word: str) -> Iterator[str]:
    least, most = schema.get(f"min{word}", count), schema.get(f"max{word}", count)
    if not least <= count <= most:
        yield f"{where} has {count} {word.lower()}, not {least} to {most}"


def _of_bounds(value: float, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    least, most = schema.get("minimum", value), schema.get("maximum", value)
    if not least <= value <= most:
        yield f"{where} is {value}, not between {least} and {most}"


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, Mapping) else []
