"""JSON Schema validation: the subset of the standard that tools and answers use."""

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
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "format"}


def unsupported_keywords(schema: Any) -> list[str]:
    """Keywords of a schema that this module does not check, for an early error.

    >>> unsupported_keywords({"type": "array", "items": {"oneOf": []}})
    ['oneOf']
    """
    if not isinstance(schema, Mapping):
        return []
    found = [word for word in schema if word not in _CHECKED | _ANNOTATIONS]
    below = [*_values(schema.get("properties")), *schema.get("anyOf", ()), schema.get("items")]
    below.append(schema.get("additionalProperties"))
    return found + [word for inner in below for word in unsupported_keywords(inner)]


def find_violation(value: Any, schema: Any, where: str) -> str | None:
    """The first violation, with its path below `where`; None if the value is valid.

    >>> find_violation({"n": [1, "2"]}, {"properties": {"n": {"items": {"type": "integer"}}}}, "it")
    "it.n[1] is '2', not of type integer"
    """
    return next(_violations(value, schema, where), None)


def _violations(value: Any, schema: Any, where: str) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    yield from _type_violations(value, schema, where)
    if isinstance(value, dict):
        yield from _object_violations(value, schema, where)
    elif isinstance(value, list):
        yield from _size_violations(len(value), schema, where, "Items")
        for i, entry in enumerate(value):
            yield from _violations(entry, schema.get("items"), f"{where}[{i}]")
    elif isinstance(value, str):
        yield from _size_violations(len(value), schema, where, "Length")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and not re.search(pattern, value):
            yield f"{where} is {value!r}, which does not match {pattern}"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _bound_violations(value, schema, where)


def _type_violations(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else list(wanted or [])
    kinds = tuple(kind for name in names for kind in _TYPES.get(name, ()))
    # In Python True is an int; in JSON it is not.
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


def _object_violations(
    value: dict[str, Any], schema: Mapping[str, Any], where: str
) -> Iterator[str]:
    known = schema.get("properties")
    known = known if isinstance(known, Mapping) else {}
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is missing"
    more = schema.get("additionalProperties", True)
    for name, entry in value.items():
        if name not in known and more is False:
            yield f"{where}.{name} is not asked for"
        yield from _violations(entry, known.get(name, more), f"{where}.{name}")


def _size_violations(count: int, schema: Mapping[str, Any], where: str, word: str) -> Iterator[str]:
    minimum, maximum = schema.get(f"min{word}", count), schema.get(f"max{word}", count)
    if not minimum <= count <= maximum:
        yield f"{where} has {count} {word.lower()}, not {minimum} to {maximum}"


def _bound_violations(value: float, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    minimum, maximum = schema.get("minimum", value), schema.get("maximum", value)
    if not minimum <= value <= maximum:
        yield f"{where} is {value}, not between {minimum} and {maximum}"


def _values(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, Mapping) else []
