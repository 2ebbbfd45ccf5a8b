"""Dry runs open everything a run would open and name missing data."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.config import load_recipe, resolve
from paddock.envs import load_env_settings
from paddock.rl.settings import RLSettings
from paddock.rl.stages import with_stage_defaults

RECIPES = Path(__file__).parents[2] / "recipes"
STAGE = 'stage = "general"\nsteps = 1\n[init]\ncheckpoint = "model"\n'


def invoke(*words):
    found = CliRunner().invoke(app, [str(word) for word in words])
    return found.exit_code, found.output


def stage(name):
    return resolve(
        RLSettings, with_stage_defaults(load_recipe(RECIPES / "glm5" / f"{name}.toml", []))
    )


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """Writes a pipeline of one stage with these tasks and changes to its folder."""
    monkeypatch.chdir(tmp_path)

    def write(tasks, command="rl", recipe=STAGE):
        (tmp_path / "stage.toml").write_text(recipe + tasks)
        lines = ["[[stages]]", 'name = "only"', f'command = "{command}"', 'recipe = "stage.toml"']
        (tmp_path / "pipeline.toml").write_text("\n".join(lines))
        return tmp_path

    return write


# --- the paper's recipe ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning", "agentic", "general", "distill"])
def test_every_environment_of_glm5_can_be_opened_but_for_its_data(name):
    for task in stage(name).tasks.values():
        chosen = load_env_settings(task.env, task.args)
        assert chosen.data_files()
        assert chosen.make_without_data().name == task.env


def test_glm5_reasoning_uses_the_python_tool_and_a_judge_for_science():
    tasks = stage("reasoning").tasks
    assert set(tasks) == {"math", "science", "code", "tools"}
    assert len({task.ratio for task in tasks.values()}) == 1  # balanced
    assert tasks["tools"].env == "math-file"
    opened = load_env_settings("math-file", tasks["tools"].args).make_without_data()
    assert opened.factories  # the Python tool
    (judge,) = tasks["science"].args["rewards"]
    assert (judge["kind"], judge["min_score"], judge["max_score"]) == ("judge", 0, 1)  # binary


def test_glm5_general_rewards_are_rules_a_reward_model_and_judges():
    (task,) = stage("general").tasks.values()
    parts = task.args["rewards"]
    assert {part["kind"] for part in parts} == {"length", "model", "judge"}
    assert sum(part["weight"] for part in parts) == pytest.approx(1.0)


def test_glm5_distils_from_sft_reasoning_and_general():
    found = stage("distill")
    assert set(found.teachers) == {"sft", "reasoning", "general"}  # figure 5 of the paper
    assert {task.teacher for task in found.tasks.values()} == set(found.teachers)
    taught = {name for name, task in found.tasks.items() if task.teacher == "reasoning"}
    assert taught == set(stage("reasoning").tasks)


def test_a_dry_run_of_glm5_names_all_data_and_what_it_must_contain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = invoke("run", RECIPES / "glm5", "--dry-run")
    assert code == 0, text
    _, _, missing = text.partition("missing:")
    lines = dict(line.strip().split(": ", 1) for line in missing.splitlines() if ": " in line)
    assert "tokenizer.json" in lines["data/glm5-tokenizer"]
    assert "'text'" in lines["data/web"] and "pretrain" in lines["data/web"]
    assert "messages" in lines["data/sft/agent"]
    assert "test_list" in lines["data/rl/code.jsonl"]
    assert '"title"' in lines["data/rl/pages.jsonl"]
    assert "instruction.md" in lines["data/rl/terminal"] and "agentic" in lines["data/rl/terminal"]
    assert "general" in lines["data/rl/chat.jsonl"] and "distill" in lines["data/rl/chat.jsonl"]
    assert '"score"' in lines["data/rl/chat_anchors.jsonl"]
    assert not any(name.startswith("runs/") for name in lines)  # written by stages


# --- custom pipelines -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "rl"])
def test_an_environment_without_a_reward_is_rejected_by_a_dry_run(pipeline, command):
    folder = pipeline('[tasks.chat]\nenv = "ask"\nargs = { train_file = "chat.jsonl" }\n')
    what = folder if command == "run" else folder / "stage.toml"
    code, text = invoke(command, what, "--dry-run")
    assert code == 1
    assert "task 'chat'" in text and "reward" in text
    assert command == "rl" or "stage 'only'" in text


def test_missing_files_of_rewards_and_models_are_named(pipeline):
    judge = 'kind = "judge", url = "http://judge/v1", model = "m", rubric = "r"'
    files = 'calibration_file = "anchors.jsonl", api_key_file = "judge.key"'
    settings = f'train_file = "chat.jsonl", rewards = [{{ {judge}, {files} }}]'
    folder = pipeline(f'[tasks.chat]\nenv = "ask"\nargs = {{ {settings} }}\n')
    code, text = invoke("run", folder, "--dry-run")
    assert code == 0, text
    for path in ("chat.jsonl", "anchors.jsonl", "judge.key", "model"):
        assert f" {path}: " in text
    code, text = invoke("rl", folder / "stage.toml", "--dry-run")
    assert code == 0 and " anchors.jsonl: " in text
    (folder / "anchors.jsonl").write_text('{"question": "q", "answer": "a", "score": 7}\n')
    (folder / "chat.jsonl").write_text('{"question": "q"}\n')
    (folder / "judge.key").write_text("k")
    code, text = invoke("run", folder, "--dry-run")
    assert code == 1 and "'score' must be a number from 0 to 1, got 7" in text


def test_existing_data_is_read(pipeline):
    tasks = '[tasks.sums]\nenv = "math-file"\nargs = { train_file = "sums.jsonl" }\n'
    folder = pipeline(tasks)
    (folder / "sums.jsonl").write_text(json.dumps({"question": "1 + 1?"}) + "\n")
    code, text = invoke("run", folder, "--dry-run")
    assert code == 1 and "task 'sums'" in text and "sums.jsonl:1: 'answer' is missing" in text
    (folder / "sums.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    code, text = invoke("run", folder, "--dry-run")
    assert code == 0 and " sums.jsonl: " not in text


def test_an_environment_without_training_tasks_is_rejected(pipeline):
    tasks = '[tasks.sums]\nenv = "math-file"\nargs = { test_file = "sums.jsonl" }\n'
    folder = pipeline(tasks)
    (folder / "sums.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    code, text = invoke("run", folder, "--dry-run")
    assert code == 1 and "task 'sums'" in text and "no training tasks" in text


def test_a_dry_run_does_not_index_missing_pages(pipeline):
    settings = 'train_file = "q.jsonl", pages_file = "pages.jsonl", index_dir = "index"'
    folder = pipeline(f'[tasks.search]\nenv = "search-file"\nargs = {{ {settings} }}\n')
    code, text = invoke("run", folder, "--dry-run")
    assert code == 0 and " pages.jsonl: " in text
    assert not (folder / "index").exists()
