"""Validates a recipe into settings; every error names the setting, the file and what is allowed."""

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paddock.config.recipe import KeyPath, Recipe
from paddock.config.renamed_keys import renamed_key
from paddock.config.settings import BaseSettings, ConfigError
from paddock.config.toml_dump import format_toml_key, format_toml_value

_S = TypeVar("_S", bound=BaseSettings)

# What each of pydantic's error types expects, where its own message does not suit a recipe.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "a string of at least {min_length} characters",
    "string_too_long": "a string of at most {max_length} characters",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "union_tag_invalid": "a table whose {discriminator} is one of {expected_tags}, not '{tag}'",
    "union_tag_not_found": "a table with the key {discriminator}",
}


def resolve(cls: type[_S], recipe: Recipe) -> _S:
    """The settings that the recipe describes.

    >>> class Optim(BaseSettings):
    ...     lr: float = 3e-4
    >>> class Run(BaseSettings):
    ...     optim: Optim = Optim()
    >>> resolve(Run, Recipe({"optim": {"lr": 1}}, {})).optim.lr
    1.0
    >>> resolve(Run, Recipe({"optim": {"lr": "1"}}, {("optim", "lr"): "nano.toml"}))
    Traceback (most recent call last):
    paddock.config.settings.ConfigError: 'optim.lr' in nano.toml must be a number, got "1"
    """
    # As JSON: pydantic then accepts an array for a tuple and still converts no scalar.
    # Dates, the only TOML type that JSON lacks, become strings.
    text = json.dumps(recipe.values, default=lambda date: date.isoformat())
    try:
        return cls.model_validate_json(text)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # Every member of a union reports the same value: one line for all of them.
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for problem in problems:
        by_path.setdefault(_path(cls, recipe.values, problem["loc"]), []).append(problem)
    # A list whose items are all invalid is also reported as too short: report only the items.
    inside = {path[:length] for path in by_path for length in range(len(path))}
    reported = {
        path: found
        for path, found in by_path.items()
        if path not in inside or any(each["type"] != "too_short" for each in found)
    }
    raise ConfigError("\n".join(_line(cls, recipe, *item) for item in reported.items()))


def _line(
    cls: type[BaseSettings], recipe: Recipe, path: KeyPath, problems: list[ErrorDetails]
) -> str:
    name, origin = f"'{_dotted(path)}'", _origin(recipe, path)
    value = problems[0]["input"]
    kinds = {problem["type"] for problem in problems}
    if kinds == {"extra_forbidden"}:
        if new := renamed_key(path):
            return f"{name}{origin} is now called '{_dotted((*path[:-1], new))}'"
        suggestion = _suggestion(cls, path)
        return f"unknown setting {name}{origin}" + (
            f"; did you mean '{suggestion}'?" if suggestion else ""
        )
    if kinds == {"missing"}:
        return f"missing setting {name}"
    where = f"{name}{origin}" if path else "the recipe"
    got = "" if isinstance(value, dict) else f", got {format_toml_value(value)}"
    expectations = " or ".join(dict.fromkeys(map(_expectation, problems))).replace(
        "or must be", "or"
    )
    return f"{where} {expectations}{got}"


def _expectation(problem: ErrorDetails) -> str:
    context = problem.get("ctx", {})
    if "error" in context:  # raised by a validator of this project
        return f"is invalid: {context['error']}"
    if problem["type"] in _EXPECTED:
        return f"must be {_EXPECTED[problem['type']].format(**context)}"
    return problem["msg"].replace("Input should", "must")


def _path(cls: type[BaseSettings], values: Any, loc: tuple[str | int, ...]) -> KeyPath:
    """Where in the recipe an error is: its location without the names of union members."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else None
        elif isinstance(values, Mapping) and part in values:
            values = values[part]
        elif part not in _fields(cls, tuple(path)):
            continue
        path.append(part)
    return tuple(path)


def _dotted(path: KeyPath) -> str:
    keys = (
        f"[{part}]" if isinstance(part, int) else f".{format_toml_key((part,))}" for part in path
    )
    return "".join(keys).removeprefix(".")


def _origin(recipe: Recipe, path: KeyPath) -> str:
    """The file, or --set, that a setting comes from; empty for a default."""
    for length in range(len(path), 0, -1):  # items of a list have the origin of the list
        if path[:length] in recipe.origins:
            return f" in {recipe.origins[path[:length]]}"
    return ""


def _suggestion(cls: type[BaseSettings], path: KeyPath) -> str | None:
    """The setting that was probably meant: a similar key in the same table, or the same key in
    another table."""
    *table, key = path
    similar = get_close_matches(str(key), _fields(cls, tuple(table)), n=1)
    if similar:
        return _dotted((*table, similar[0]))
    return next((_dotted(known) for known in _known(cls) if known[-1] == key), None)


def _fields(cls: type[BaseSettings], path: KeyPath) -> list[str]:
    """The settings that the table at `path` may hold."""
    models = [cls]
    for part in path:
        types = [
            model.model_fields[part].annotation for model in models if part in model.model_fields
        ]
        if types:  # else the name of an item: what is in a list has the models of the list
            models = [model for annotation in types for model in _models(annotation)]
    return [name for model in models for name in model.model_fields]


def _known(cls: type[BaseSettings]) -> Iterator[tuple[str, ...]]:
    for name, field in cls.model_fields.items():
        yield (name,)
        for model in _models(field.annotation):
            yield from ((name, *rest) for rest in _known(model))


def _models(annotation: Any) -> Iterator[type[BaseSettings]]:
    """The settings among the types a value may have, also inside lists, tables and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseSettings):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
