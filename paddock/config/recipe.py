"""Loads recipes: TOML files with `extends`, and --set overrides, merged into plain data.

Each layer contains only what differs: tables are merged key by key; any other value, including a
list, replaces the one before it. `extends` names one file or several, relative to the file itself;
they are applied from left to right, then the file itself, then every --set. Recipes that ship with
the package are found by name.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import Any

from paddock.config.settings import ConfigError
from paddock.config.toml_dump import format_toml_value

KeyPath = tuple[str | int, ...]  # keys, and indices into lists
SET_FLAG = "--set"
BUNDLED_RECIPES = Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Merged values, and for the path of each key the file, or --set, that set it last."""

    values: Mapping[str, Any]
    origins: Mapping[KeyPath, str]


def find_recipe(name: str | Path) -> Path:
    """The path itself if it exists; else the bundled recipe of that name, a folder or a file.

    >>> find_recipe("nano").relative_to(BUNDLED_RECIPES)
    PosixPath('nano')
    >>> find_recipe("nano/pretrain").relative_to(BUNDLED_RECIPES)
    PosixPath('nano/pretrain.toml')

    A name that is neither is returned unchanged; reading it raises the error.
    """
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    bundled = BUNDLED_RECIPES / path
    return next((p for p in (bundled, bundled.with_suffix(".toml")) if p.exists()), path)


def load_recipe(path: str | Path, sets: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or bundled under that name, with what it extends below it and `sets`
    ("a.b=c") on top."""
    layers = [*_layers(find_recipe(path), ()), *((SET_FLAG, parse_override(text)) for text in sets)]
    values: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for origin, table in layers:
        values = _merged(values, table)
        origins |= dict.fromkeys(_paths(table, ()), origin)
    return Recipe(values, origins)


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Overrides alone, as one table; of two that set the same key the last one wins.

    >>> parse_overrides(["config.terms=3", "config.digits=2", "config.terms=4"])
    {'config': {'terms': 4, 'digits': 2}}
    """
    values: dict[str, Any] = {}
    for text in texts:
        values = _merged(values, parse_override(text))
    return values


def parse_override(text: str) -> dict[str, Any]:
    """An override as a nested table. What is not a TOML value is a string.

    >>> parse_override("optim.lr=3e-4"), parse_override("model=nano"), parse_override('tag="true"')
    ({'optim': {'lr': 0.0003}}, {'model': 'nano'}, {'tag': 'true'})
    """
    key, equals, value = text.partition("=")
    for candidate in (value, format_toml_value(value)) if equals else ():
        try:
            return tomllib.loads(f"{key} = {candidate}")
        except tomllib.TOMLDecodeError:
            continue
    raise ConfigError(f"{SET_FLAG} {text}: expected a setting and its value, such as optim.lr=3e-4")


def _layers(file: Path, above: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables that make up `file`, each with its origin, the first to be applied first."""
    chain = (*above, file)
    if file.resolve() in [other.resolve() for other in above]:
        raise ConfigError(f"recipes extend each other: {' -> '.join(map(str, chain))}")
    table = _read(file, chain)
    extends = table.pop("extends", [])
    parents = [extends] if isinstance(extends, str) else extends
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"'extends' in {file} must be a path or a list of paths")
    for parent in parents:
        yield from _layers(Path(normpath(file.parent / parent)), chain)
    yield str(file), table


def _read(file: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        extended_by = f", which {chain[-2]} extends" if len(chain) > 1 else ""
        raise ConfigError(f"cannot read recipe {file}{extended_by}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        if isinstance(value, dict):
            below = merged.get(key)
            value = _merged(below if isinstance(below, dict) else {}, value)
        merged[key] = value
    return merged


def _paths(table: Mapping[str, Any], above: KeyPath) -> Iterator[KeyPath]:
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))
