"""`paddock train`: recipes, dry runs, progress lines, trackers."""

import os
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.config import dump_toml, load_recipe, resolve
from paddock.launch import UserError
from paddock.launch.trackers import Tracker, open_tracker
from paddock.rl.settings import RLSettings
from paddock.rl.stages import with_stage_defaults
from paddock.train import TrainSettings
from tests.train.tiny import network_folder, settings

RECIPES = Path(__file__).parents[2] / "recipes"


def paddock(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paddock.cli", *map(str, words)]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_every_shipped_recipe_resolves():
    parts = {
        "base.toml",
        "rl.toml",
        "pipeline.toml",
        "w4a8.toml",
    }  # parents of others, or covered by other tests
    kinds: Counter[type] = Counter()
    for path in RECIPES.rglob("*.toml"):
        if path.name in parts:
            continue
        recipe = load_recipe(path)
        if "tasks" in recipe.values:
            kinds[type(resolve(RLSettings, with_stage_defaults(recipe)))] += 1
        else:
            kinds[type(resolve(TrainSettings, recipe))] += 1
    assert kinds[TrainSettings] > 5
    assert kinds[RLSettings] >= 4


def test_a_typo_in_a_recipe_is_rejected_by_name_and_nothing_is_written(tmp_path):
    (tmp_path / "typo.toml").write_text(
        f'extends = "{RECIPES / "nano" / "pretrain.toml"}"\n[optim]\nwarmpu_ratio = 0.1\n'
    )
    found = paddock("train", tmp_path / "typo.toml", "--out", tmp_path / "run")
    assert found.returncode == 1
    assert "unknown setting 'optim.warmpu_ratio'" in found.stderr
    assert "did you mean 'optim.warmup_ratio'?" in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_a_recipe_that_resolves_to_the_same_and_trains_nothing(tmp_path):
    recipe = RECIPES / "nano" / "pretrain.toml"
    words = ["train", str(recipe), "--dry-run", "--out", str(tmp_path / "run"), "--set", "steps=7"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    printed = found.output[: found.output.index(" estimate ")]
    (tmp_path / "printed.toml").write_text(printed)
    wanted = resolve(TrainSettings, load_recipe(recipe, ["steps=7"]))
    assert resolve(TrainSettings, load_recipe(tmp_path / "printed.toml")) == wanted
    assert "estimated time:" in found.output
    assert not (tmp_path / "run").exists()


def test_a_run_prints_plain_lines_without_a_terminal(tmp_path):
    chosen = settings(network_folder(tmp_path / "init"), steps=2)
    (tmp_path / "recipe.toml").write_text(dump_toml(chosen))
    found = paddock("train", tmp_path / "recipe.toml", "--out", tmp_path / "run")
    assert found.returncode == 0, found.stderr
    assert "step 2/2" in found.stderr
    assert "tok/s" in found.stderr
    assert "\x1b" not in found.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    report = tmp_path / "run" / "report.html"
    assert found.stdout.endswith(f"report: {report}\n")
    assert "Step 2 of 2." in report.read_text()


def tracked_run(tmp_path: Path, tracker: str, **environment: str) -> Path:
    chosen = settings(network_folder(tmp_path / "init"), steps=2)
    (tmp_path / "recipe.toml").write_text(dump_toml(chosen))
    words = ("train", tmp_path / "recipe.toml", "--out", tmp_path / "run", "--track", tracker)
    found = paddock(*words, **environment)
    assert found.returncode == 0, found.stderr
    return tmp_path / "run"


def test_tensorboard_has_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked_run(tmp_path, "tensorboard")
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss/loss")] == [1, 2]
    assert "tokens_per_second" in events.Tags()["scalars"]


def test_trackio_has_every_step(tmp_path):
    home = tmp_path / "trackio"
    tracked_run(tmp_path, "trackio", TRACKIO_DIR=str(home))
    (database,) = home.glob("paddock*.db")
    rows = sqlite3.connect(database).execute("select step, metrics from metrics").fetchall()
    assert {step for step, _ in rows} == {1, 2}
    assert all("loss/loss" in str(metrics) for _, metrics in rows)


def test_a_missing_tracker_is_reported_with_its_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(UserError, match=r"pip install 'paddock\[track\]'"),
        open_tracker(Tracker.WANDB, tmp_path, {}),
    ):
        pass
