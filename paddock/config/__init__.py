"""Settings that are frozen and whole, and recipes that say how they differ from the defaults.

files.py     files that settings name, and what each must contain
recipe.py    TOML files with `extends`, and --set overrides, merged into plain data
resolve.py   a recipe into settings, or into errors a person can act on
settings.py  the base of every room's settings
toml.py      settings back into TOML
"""

from paddock.config.files import DataFile
from paddock.config.recipe import Recipe, load_recipe, parse_sets
from paddock.config.resolve import resolve
from paddock.config.settings import ConfigError, Settings
from paddock.config.toml import dump

__all__ = [
    "ConfigError",
    "DataFile",
    "Recipe",
    "Settings",
    "dump",
    "load_recipe",
    "parse_sets",
    "resolve",
]
