"""Settings of a stage from its recipe, and the default folder of its run."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.launch.errors import UserError

if TYPE_CHECKING:
    from paddock.quant import QuantSettings
    from paddock.rl import RLSettings
    from paddock.train import TrainSettings

StrPath = str | PathLike[str]


def default_run_dir(recipe: StrPath) -> Path:
    """`runs/RECIPE'S FOLDER/RECIPE'S NAME`.

    >>> default_run_dir("recipes/nano/sft.toml").as_posix()
    'runs/nano/sft'
    """
    path = Path(recipe)
    return Path("runs") / path.resolve().parent.name / path.stem


def load_train_settings(recipe: StrPath, overrides: Sequence[str] = ()) -> "TrainSettings":
    """The resolved settings of a training stage; `overrides` are "key=value" as of `--set`."""
    from paddock.config import load_recipe, resolve
    from paddock.train import TrainSettings

    return resolve(TrainSettings, load_recipe(Path(recipe), list(overrides)))


def load_rl_settings(recipe: StrPath, overrides: Sequence[str] = ()) -> "RLSettings":
    """The resolved settings of an RL or distillation stage, with the defaults of its stage."""
    from paddock.config import load_recipe, resolve
    from paddock.rl import RLSettings, with_stage_defaults

    return resolve(RLSettings, with_stage_defaults(load_recipe(Path(recipe), list(overrides))))


def load_quant_settings(recipe: str, overrides: Sequence[str] = ()) -> "QuantSettings":
    """The resolved settings of a recipe by name or file."""
    from paddock.config import SET_FLAG, Recipe, load_recipe, parse_overrides, resolve
    from paddock.quant import RECIPES, QuantSettings

    if recipe not in RECIPES and not Path(recipe).is_file():
        raise UserError(f"recipe '{recipe}' must be a file or one of {', '.join(RECIPES)}")
    if recipe not in RECIPES:
        return resolve(QuantSettings, load_recipe(Path(recipe), list(overrides)))
    values = RECIPES[recipe].model_dump(mode="json", exclude_none=True)
    changes = parse_overrides(list(overrides))
    return resolve(QuantSettings, Recipe(values | changes, {(key,): SET_FLAG for key in changes}))


def check_distill_recipe(recipe: StrPath, overrides: Sequence[str] = ()) -> None:
    """Raise UserError unless the recipe's stage is "distill"."""
    from paddock.config import load_recipe

    stage = load_recipe(Path(recipe), list(overrides)).values.get("stage")
    if stage != "distill":
        raise UserError(f"{recipe}: stage must be 'distill', got {stage!r}; see paddock rl")
