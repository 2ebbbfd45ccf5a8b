"""The base of every room's settings."""

from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """What the user must change, one line a problem, each setting named by its full path."""


class BaseSettings(BaseModel):
    """Frozen, complete once built, and made of what TOML can say: text (also for paths), numbers,
    booleans, tuples and further settings.

    Unknown names are refused, defaults are checked like given values, and no value is converted,
    except a whole number given for a float. TOML has no null: None is said by leaving a key out, so
    it must be the default, and nothing inside a list or table can be None.

    >>> class Decay(BaseSettings):
    ...     start: int | None = 100
    Traceback (most recent call last):
    TypeError: Decay.start may be None, so None must be its default
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, field in cls.model_fields.items():
            types = get_args(field.annotation)
            if NoneType in types and field.default is not None:
                raise TypeError(f"{cls.__name__}.{name} may be None, so None must be its default")
            if any(_mentions_none(inner) for kind in types for inner in get_args(kind)):
                raise TypeError(f"{cls.__name__}.{name} may hold a None that TOML cannot say")


def _mentions_none(kind: Any) -> bool:
    return kind is NoneType or any(map(_mentions_none, get_args(kind)))
