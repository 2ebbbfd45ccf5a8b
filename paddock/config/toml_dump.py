"""Writes settings as TOML; the standard library can only read it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paddock.config.settings import BaseSettings

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(settings: BaseSettings) -> str:
    """A recipe that resolves to settings equal to these, defaults written out.

    >>> class Optim(BaseSettings):
    ...     lr: float = 3e-4
    ...     betas: tuple[float, ...] = (0.9, 0.95)
    >>> class Run(BaseSettings):
    ...     name: str = "nano"
    ...     resume_from: str | None = None
    ...     optim: Optim = Optim()
    >>> print(dump_toml(Run()), end="")
    name = "nano"
    <BLANKLINE>
    [optim]
    lr = 0.0003
    betas = [0.9, 0.95]
    """
    return "\n".join(_lines(settings.model_dump(mode="json"), ())).lstrip("\n") + "\n"


def format_toml_value(value: object) -> str:
    """The value on one line, as written after an equals sign."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # A JSON string is a TOML string, except that TOML also requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(format_toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (
            f"{format_toml_key((key,))} = {format_toml_value(item)}"
            for key, item in _present(value)
        )
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"TOML cannot represent {value!r}")


def format_toml_key(path: tuple[str, ...]) -> str:
    """
    >>> format_toml_key(("mix", "math v1.2"))
    'mix."math v1.2"'
    """
    return ".".join(key if _BARE_KEY.fullmatch(key) else format_toml_value(key) for key in path)


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    later = []
    for key, value in _present(table):
        if isinstance(value, Mapping) or _is_tables(value):
            later.append((key, value))  # a header would claim the plain keys that follow it
        else:
            yield f"{format_toml_key((key,))} = {format_toml_value(value)}"
    for key, value in later:
        name = format_toml_key((*path, key))
        for item in [value] if isinstance(value, Mapping) else value:
            yield f"\n[{name}]" if isinstance(value, Mapping) else f"\n[[{name}]]"
            yield from _lines(item, (*path, key))


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(v, Mapping) for v in value)


def _present(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in table.items() if value is not None)
