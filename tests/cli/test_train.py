"""The training verb: what it says before, during and instead of a run."""

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.config import dump, load_recipe, resolve
from paddock.train import TrainSettings
from tests.train.tiny import network_folder, settings

RECIPES = Path(__file__).parents[2] / "recipes"


def paddock(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paddock.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_recipe_we_ship_resolves():
    stages = [path for path in RECIPES.rglob("*.toml") if path.name != "base.toml"]
    assert len(stages) > 5
    for path in stages:
        resolve(TrainSettings, load_recipe(path))


def test_a_recipe_with_a_typo_is_refused_by_name_and_nothing_is_written(tmp_path):
    (tmp_path / "typo.toml").write_text(
        f'extends = "{RECIPES / "nano" / "pretrain.toml"}"\n[optim]\nwarmpu = 0.1\n'
    )
    found = paddock("train", tmp_path / "typo.toml", "--out", tmp_path / "run")
    assert found.returncode == 1
    assert "unknown setting 'optim.warmpu'" in found.stderr
    assert "did you mean 'optim.warmup'?" in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_a_recipe_that_resolves_to_the_same_and_trains_nothing(tmp_path):
    recipe = RECIPES / "nano" / "pretrain.toml"
    words = ["train", str(recipe), "--dry-run", "--out", str(tmp_path / "run"), "--set", "steps=7"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    printed = found.output[: found.output.index(" plan ")]
    (tmp_path / "printed.toml").write_text(printed)
    wanted = resolve(TrainSettings, load_recipe(recipe, ["steps=7"]))
    assert resolve(TrainSettings, load_recipe(tmp_path / "printed.toml")) == wanted
    assert "expected:" in found.output
    assert not (tmp_path / "run").exists()


def test_a_run_speaks_in_plain_lines_when_nobody_watches(tmp_path):
    chosen = settings(network_folder(tmp_path / "born"), steps=2)
    (tmp_path / "recipe.toml").write_text(dump(chosen))
    found = paddock("train", tmp_path / "recipe.toml", "--out", tmp_path / "run")
    assert found.returncode == 0, found.stderr
    assert "step 2/2" in found.stderr
    assert "tokens/s" in found.stderr
    assert "\x1b" not in found.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
