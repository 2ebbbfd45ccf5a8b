"""A plan: stages one after another, skipped when done, refused when changed."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.config import ConfigError, load_recipe, resolve
from paddock.dashboard import read_pipeline_report
from paddock.launch.pipeline import PipelineSettings, finished_stages, load_pipeline, resolve_stages
from tests.cli.pipelines import plan_in

RECIPES = Path(__file__).parents[2] / "recipes"
PLAN = """
[[stages]]
name = "first"
recipe = "first.toml"
description = "from nothing"

[[stages]]
name = "second"
recipe = "first.toml"
description = "a little more"
overrides = ["init.checkpoint={out}/first", "optim.lr=1e-4"]

[[suites]]
name = "loss"
kind = "loss"
args = { corpus_stage = "first" }
num_tasks = 1
from_stage = "first"
"""


@pytest.fixture
def plan(tmp_path):
    return plan_in(tmp_path, PLAN, steps=3)


def run(plan, *words):
    return CliRunner().invoke(app, ["run", str(plan), "--out", str(plan.parent / "run"), *words])


def test_a_plan_runs_its_stages_and_measures_after_each(plan):
    found = run(plan)
    assert found.exit_code == 0, found.output
    out = plan.parent / "run"
    assert list(finished_stages(out)) == ["first", "second"]
    story = read_pipeline_report(out)
    assert [list(stage.scores) for stage in story.stages] == [["loss"], ["loss"]]
    assert (out / "report.html").read_text().count("a little more")
    assert "paddock train" in found.output  # the command that a person could run alone
    assert "retained (last/best)" in found.output


def test_a_finished_stage_is_skipped_and_a_changed_one_refused(plan):
    assert run(plan, "--until", "first").exit_code == 0
    before = {p: p.stat().st_mtime_ns for p in (plan.parent / "run" / "first").rglob("*")}
    found = run(plan)
    assert "first: already finished" in found.output
    assert {p: p.stat().st_mtime_ns for p in (plan.parent / "run" / "first").rglob("*")} == before
    changed = run(plan, "--set", "seed=1")
    assert changed.exit_code == 1
    assert "was made by another recipe" in changed.output
    anew = run(plan, "--set", "seed=1", "--restart-from", "first")
    assert anew.exit_code == 0, anew.output
    assert "first: already finished" not in anew.output


def test_what_comes_of_a_stage_that_is_run_anew_is_thrown_away_too(plan):
    assert run(plan).exit_code == 0
    assert run(plan, "--restart-from", "first", "--until", "first").exit_code == 0
    assert list(finished_stages(plan.parent / "run")) == ["first"]
    assert not (plan.parent / "run" / "second").exists()


def test_what_is_left_is_said_at_the_start_and_after_each_stage(plan):
    text = PLAN.replace("description =", "estimated_s = 5\ndescription =")
    (plan / "pipeline.toml").write_text(text)
    found = run(plan)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0].startswith("estimated time: ") and lines[0].endswith(" on this machine")
    assert sum(line.strip().startswith("about ") and "remaining" in line for line in lines) == 1
    assert "estimated time" not in run(plan).output  # all of it is done


def test_a_dry_run_prints_commands_and_writes_nothing(plan):
    found = run(plan, "--dry-run")
    assert found.exit_code == 0
    assert "to do" in found.output
    assert not (plan.parent / "run").exists()


@pytest.mark.parametrize("name", sorted(p.parent.name for p in RECIPES.glob("*/pipeline.toml")))
def test_every_plan_of_ours_is_sound(name, tmp_path):
    found = run(RECIPES / name, "--dry-run", "--out", str(tmp_path / "run"))
    assert found.exit_code == 0, found.output
    assert not (tmp_path / "run").exists()
    if name == "glm5":
        assert "753.86 B parameters" in found.output
        assert "2048 of 2048 accelerators (data 32 x expert 8 x context 8)" in found.output
        assert "max staleness 8" in found.output


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("resources.accelerators=4", "needs 2048 accelerators (data 256 x expert 8 x context 1)"),
        ("resources.accelerator_memory_gib=8", "GiB per accelerator"),
    ],
)
def test_a_plan_too_big_for_its_cluster_is_refused(change, complaint, tmp_path):
    found = run(RECIPES / "glm5", "--dry-run", "--out", str(tmp_path / "run"), "--set", change)
    assert found.exit_code == 1
    assert complaint in found.output


def test_a_world_that_is_set_wrongly_is_found_before_the_run(plan):
    (plan / "rl.toml").write_text(
        'stage = "reasoning"\nsteps = 1\n[init]\ncheckpoint = "x"\n'
        '[tasks.sums]\nenv = "math"\nargs = { colour = 1 }\n'
    )
    more = '[[stages]]\nname = "third"\ncommand = "rl"\nrecipe = "rl.toml"\n'
    (plan / "pipeline.toml").write_text(PLAN + more)
    found = run(plan, "--dry-run")
    assert found.exit_code == 1
    assert "colour" in found.output


@pytest.mark.parametrize(
    ("skill", "complaint"),
    [
        ('kind = "niah"\nargs = { corpus_stage = "first", task = "nail" }', "nail"),
        ('env = "mathh"', "environment 'mathh' not found"),
        ('env = "math"\nargs = { colour = 1 }', "colour"),
    ],
)
def test_a_skill_that_cannot_be_measured_is_found_before_the_run(plan, skill, complaint):
    more = f'[[suites]]\nname = "its own name"\nfrom_stage = "first"\n{skill}\n'
    (plan / "pipeline.toml").write_text(PLAN + more)
    found = run(plan)
    assert found.exit_code == 1
    assert "its own name" in found.output
    assert complaint in found.output
    assert not (plan.parent / "run").exists()


@pytest.mark.parametrize("option", ["--until", "--restart-from"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_stage_that_is_not_there_is_named_with_those_that_are(plan, option, dry):
    found = run(plan, option, "third", *dry)
    assert found.exit_code == 1
    assert "stages are first, second" in found.output
    assert not (plan.parent / "run").exists()


def test_a_dry_run_says_what_would_be_done_anew_and_throws_nothing_away(plan):
    assert run(plan, "--until", "first").exit_code == 0
    assert "first: from nothing (done)" in run(plan, "--dry-run").output
    found = run(plan, "--dry-run", "--restart-from", "first")
    assert "first: from nothing (to do)" in found.output
    assert list(finished_stages(plan.parent / "run")) == ["first"]


def test_a_change_may_be_a_table_and_its_command_can_be_pasted(plan):
    table = "dataloader.mixture.weights={chains = 1.0}"
    text = PLAN.replace('"optim.lr=1e-4"', f'"{table}"')
    (plan / "pipeline.toml").write_text(text)
    recipes, wanted = load_pipeline(plan, [])
    _, second = resolve_stages(wanted, recipes, Path("my runs"))
    assert second.overrides == ("init.checkpoint=my runs/first", table, "seed=0")
    words = shlex.split(second.command_line)
    assert table in words and "init.checkpoint=my runs/first" in words


def test_a_plan_that_contradicts_itself_is_refused(plan):
    (plan / "pipeline.toml").write_text(
        PLAN.replace('from_stage = "first"', 'from_stage = "zeroth"')
    )
    with pytest.raises(ConfigError, match="stage 'zeroth' not found"):
        load_pipeline(plan, [])
    (plan / "pipeline.toml").write_text(PLAN.replace('name = "second"', 'name = "first"'))
    with pytest.raises(ConfigError, match="two stages have the same name"):
        load_pipeline(plan, [])


def test_a_changed_parent_changes_what_a_stage_is(plan):
    recipes, wanted = load_pipeline(plan, [])
    one = resolve_stages(wanted, recipes, Path("a"))
    assert [s.digest for s in resolve_stages(wanted, recipes, Path("b"))] == [s.digest for s in one]
    text = (plan / "first.toml").read_text()
    (plan / "first.toml").write_text(text.replace("steps = 3", "steps = 4"))
    two = resolve_stages(wanted, recipes, Path("a"))
    assert all(a.digest != b.digest for a, b in zip(one, two, strict=True))


def test_killed_at_random_moments_it_ends_in_the_same_place(plan, tmp_path):
    command = [sys.executable, "-m", "paddock.cli", "run", str(plan), "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def weights(out):
        model = out / "second" / "checkpoints" / "step-00000003" / "model"
        return (model / "model.safetensors").read_bytes()

    subprocess.run([*command, str(tmp_path / "calm")], check=True, env=environment)
    rng, stormy = random.Random(0), tmp_path / "stormy"
    for _ in range(3):
        child = subprocess.Popen([*command, str(stormy)], env=environment)
        time.sleep(rng.uniform(2, 6))
        child.send_signal(signal.SIGKILL)
        child.wait()
    subprocess.run([*command, str(stormy)], check=True, env=environment)
    assert weights(stormy) == weights(tmp_path / "calm")
    scores = [
        [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        for out in (tmp_path / "calm", stormy)
    ]
    calm, after = ({e["stage"]: e["score"] for e in s if e["kind"] == "skill"} for s in scores)
    assert calm == after


@pytest.mark.parametrize(
    "file", sorted(RECIPES.rglob("pipeline.toml")), ids=lambda p: p.parent.name
)
def test_every_plan_we_ship_resolves_with_its_recipes(file, tmp_path):
    wanted = resolve(PipelineSettings, load_recipe(file))
    assert len(resolve_stages(wanted, file.parent, tmp_path)) == len(wanted.stages)
