"""Base class of all settings."""

from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

NonNegativeWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ConfigError(ValueError):
    """Invalid settings: one line per problem, with the full path of each setting."""


class BaseSettings(BaseModel):
    """Frozen settings of types that TOML can represent: strings (also for paths), numbers,
    booleans, tuples and nested settings.

    Unknown keys are rejected, defaults are validated too, and no value is converted, except an
    integer to a float. TOML has no null: omitting a key means None, so None must be the default,
    and nothing inside a list or table can be None.

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
                raise TypeError(
                    f"{cls.__name__}.{name} may contain None, which TOML cannot represent"
                )


def _mentions_none(kind: Any) -> bool:
    return kind is NoneType or any(map(_mentions_none, get_args(kind)))
