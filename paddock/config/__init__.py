"""Settings as frozen pydantic models, and TOML recipes that override their defaults.

recipe.py          loads TOML recipes with `extends` and --set overrides; finds bundled ones
renamed_keys.py    settings keys of earlier versions, for errors that name the new key
required_files.py  files that settings name, and what each must contain
resolve.py         validates a recipe into settings
settings.py        base class of all settings
toml_dump.py       writes settings as TOML
"""

from paddock.config.recipe import SET_FLAG, Recipe, find_recipe, load_recipe, parse_overrides
from paddock.config.required_files import RequiredFile
from paddock.config.resolve import resolve
from paddock.config.settings import BaseSettings, ConfigError, NonNegativeWeight
from paddock.config.toml_dump import dump_toml

__all__ = [
    "SET_FLAG",
    "BaseSettings",
    "ConfigError",
    "NonNegativeWeight",
    "Recipe",
    "RequiredFile",
    "dump_toml",
    "find_recipe",
    "load_recipe",
    "parse_overrides",
    "resolve",
]
