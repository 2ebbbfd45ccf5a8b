"""`paddock run`: stages run in order, are skipped when finished and rejected when changed."""

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
from tests.cli.pipelines import write_pipeline

RECIPES = Path(__file__).parents[2] / "recipes"
PIPELINE = """
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
def pipeline(tmp_path):
    return write_pipeline(tmp_path, PIPELINE, steps=3)


def run(pipeline, *words):
    return CliRunner().invoke(
        app, ["run", str(pipeline), "--out", str(pipeline.parent / "run"), *words]
    )


def test_a_pipeline_runs_its_stages_and_the_suites_after_each(pipeline):
    found = run(pipeline)
    assert found.exit_code == 0, found.output
    out = pipeline.parent / "run"
    assert list(finished_stages(out)) == ["first", "second"]
    report = read_pipeline_report(out)
    assert [list(stage.scores) for stage in report.stages] == [["loss"], ["loss"]]
    assert (out / "report.html").read_text().count("a little more")
    assert "paddock train" in found.output  # the command that runs the stage alone
    assert "retained (last/best)" in found.output


def test_a_finished_stage_is_skipped_and_a_changed_one_rejected(pipeline):
    assert run(pipeline, "--until", "first").exit_code == 0
    before = {p: p.stat().st_mtime_ns for p in (pipeline.parent / "run" / "first").rglob("*")}
    found = run(pipeline)
    assert "first: already finished" in found.output
    assert {
        p: p.stat().st_mtime_ns for p in (pipeline.parent / "run" / "first").rglob("*")
    } == before
    changed = run(pipeline, "--set", "seed=1")
    assert changed.exit_code == 1
    assert "was made by another recipe" in changed.output
    anew = run(pipeline, "--set", "seed=1", "--restart-from", "first")
    assert anew.exit_code == 0, anew.output
    assert "first: already finished" not in anew.output


def test_restarting_a_stage_removes_the_stages_that_depend_on_it(pipeline):
    assert run(pipeline).exit_code == 0
    assert run(pipeline, "--restart-from", "first", "--until", "first").exit_code == 0
    assert list(finished_stages(pipeline.parent / "run")) == ["first"]
    assert not (pipeline.parent / "run" / "second").exists()


def test_the_estimated_time_is_printed_at_the_start_and_after_each_stage(pipeline):
    text = PIPELINE.replace("description =", "estimated_s = 5\ndescription =")
    (pipeline / "pipeline.toml").write_text(text)
    found = run(pipeline)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0].startswith("estimated time: ") and lines[0].endswith(" on this machine")
    assert sum(line.strip().startswith("about ") and "remaining" in line for line in lines) == 1
    assert "estimated time" not in run(pipeline).output  # everything is finished


def test_a_dry_run_prints_commands_and_writes_nothing(pipeline):
    found = run(pipeline, "--dry-run")
    assert found.exit_code == 0
    assert "to do" in found.output
    assert not (pipeline.parent / "run").exists()


@pytest.mark.parametrize("name", sorted(p.parent.name for p in RECIPES.glob("*/pipeline.toml")))
def test_every_shipped_pipeline_is_valid(name, tmp_path):
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
def test_a_pipeline_too_large_for_its_cluster_is_rejected(change, complaint, tmp_path):
    found = run(RECIPES / "glm5", "--dry-run", "--out", str(tmp_path / "run"), "--set", change)
    assert found.exit_code == 1
    assert complaint in found.output


def test_invalid_environment_args_are_found_before_the_run(pipeline):
    (pipeline / "rl.toml").write_text(
        'stage = "reasoning"\nsteps = 1\n[init]\ncheckpoint = "x"\n'
        '[tasks.sums]\nenv = "math"\nargs = { colour = 1 }\n'
    )
    more = '[[stages]]\nname = "third"\ncommand = "rl"\nrecipe = "rl.toml"\n'
    (pipeline / "pipeline.toml").write_text(PIPELINE + more)
    found = run(pipeline, "--dry-run")
    assert found.exit_code == 1
    assert "colour" in found.output


@pytest.mark.parametrize(
    ("suite", "complaint"),
    [
        ('kind = "niah"\nargs = { corpus_stage = "first", task = "nail" }', "nail"),
        ('env = "mathh"', "environment 'mathh' not found"),
        ('env = "math"\nargs = { colour = 1 }', "colour"),
        ('env = "math"\ncontext_management = { recent_turns = 0 }', "recent_turns"),
    ],
)
def test_an_invalid_suite_is_found_before_the_run(pipeline, suite, complaint):
    more = f'[[suites]]\nname = "its own name"\nfrom_stage = "first"\n{suite}\n'
    (pipeline / "pipeline.toml").write_text(PIPELINE + more)
    found = run(pipeline)
    assert found.exit_code == 1
    assert "its own name" in found.output
    assert complaint in found.output
    assert not (pipeline.parent / "run").exists()


@pytest.mark.parametrize("option", ["--until", "--restart-from"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_an_unknown_stage_is_named_with_the_known_ones(pipeline, option, dry):
    found = run(pipeline, option, "third", *dry)
    assert found.exit_code == 1
    assert "stages are first, second" in found.output
    assert not (pipeline.parent / "run").exists()


def test_a_dry_run_lists_what_would_be_rerun_and_removes_nothing(pipeline):
    assert run(pipeline, "--until", "first").exit_code == 0
    assert "first: from nothing (done)" in run(pipeline, "--dry-run").output
    found = run(pipeline, "--dry-run", "--restart-from", "first")
    assert "first: from nothing (to do)" in found.output
    assert list(finished_stages(pipeline.parent / "run")) == ["first"]


def test_an_override_may_be_a_table_and_its_command_is_shell_quoted(pipeline):
    table = "dataloader.mixture.weights={chains = 1.0}"
    text = PIPELINE.replace('"optim.lr=1e-4"', f'"{table}"')
    (pipeline / "pipeline.toml").write_text(text)
    recipes, wanted = load_pipeline(pipeline, [])
    _, second = resolve_stages(wanted, recipes, Path("my runs"))
    assert second.overrides == ("init.checkpoint=my runs/first", table, "seed=0")
    words = shlex.split(second.command_line)
    assert table in words and "init.checkpoint=my runs/first" in words


def test_an_inconsistent_pipeline_is_rejected(pipeline):
    (pipeline / "pipeline.toml").write_text(
        PIPELINE.replace('from_stage = "first"', 'from_stage = "zeroth"')
    )
    with pytest.raises(ConfigError, match="stage 'zeroth' not found"):
        load_pipeline(pipeline, [])
    (pipeline / "pipeline.toml").write_text(PIPELINE.replace('name = "second"', 'name = "first"'))
    with pytest.raises(ConfigError, match="two stages have the same name"):
        load_pipeline(pipeline, [])


def test_a_changed_parent_changes_the_digest_of_a_stage(pipeline):
    recipes, wanted = load_pipeline(pipeline, [])
    one = resolve_stages(wanted, recipes, Path("a"))
    assert [s.digest for s in resolve_stages(wanted, recipes, Path("b"))] == [s.digest for s in one]
    text = (pipeline / "first.toml").read_text()
    (pipeline / "first.toml").write_text(text.replace("steps = 3", "steps = 4"))
    two = resolve_stages(wanted, recipes, Path("a"))
    assert all(a.digest != b.digest for a, b in zip(one, two, strict=True))


def test_killed_at_random_points_it_ends_with_the_same_weights(pipeline, tmp_path):
    command = [sys.executable, "-m", "paddock.cli", "run", str(pipeline), "--out"]
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
    calm, after = (
        {e["stage"]: e["score"] for e in s if e["kind"] == "suite_result"} for s in scores
    )
    assert calm == after


@pytest.mark.parametrize(
    "file", sorted(RECIPES.rglob("pipeline.toml")), ids=lambda p: p.parent.name
)
def test_every_shipped_pipeline_resolves_with_its_recipes(file, tmp_path):
    wanted = resolve(PipelineSettings, load_recipe(file))
    assert len(resolve_stages(wanted, file.parent, tmp_path)) == len(wanted.stages)
