"""Settings that are frozen and whole, and recipes that say how they differ from the defaults.

required_files.py  files that settings name, and what each must contain
recipe.py    TOML files with `extends`, and --set overrides, merged into plain data
resolve.py   a recipe into settings, or into errors a person can act on
settings.py  the base of every room's settings
toml_dump.py  settings back into TOML
"""

from paddock.config.recipe import SET_FLAG, Recipe, load_recipe, parse_overrides
from paddock.config.required_files import RequiredFile
from paddock.config.resolve import resolve
from paddock.config.settings import BaseSettings, ConfigError
from paddock.config.toml_dump import dump_toml

__all__ = [
    "SET_FLAG",
    "BaseSettings",
    "ConfigError",
    "Recipe",
    "RequiredFile",
    "dump_toml",
    "load_recipe",
    "parse_overrides",
    "resolve",
]
