"""Task ids depend on the task, not on how the environment is run."""

import json

import pytest

from paddock.envs import make
from paddock.envs.registry import REGISTRY, EnvSettings

LENGTH = {"kind": "length", "full_reward_chars": 1, "zero_reward_chars": 2}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("math", {"seed": 1}),
        ("math", {"level": 3}),
        ("math", {"families": ["linear"]}),
        ("math", {"answer_format": "tag"}),
        ("logic", {"level": 3}),
        ("logic", {"families": ["circuit"]}),
        ("code", {"level": 3}),
        ("code", {"families": ["texts"]}),
        ("service", {"level": 3}),
        ("service", {"seed": 1}),
    ],
)
def test_settings_that_change_tasks_change_ids(name, change):
    assert make(name).task(0).id != make(name, change).task(0).id


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("math", {"max_turns": 5, "python_tool": {"timeout_s": 3.0}, "timeout_s": 5.0}),
        ("math", {"rewards": [LENGTH], "correct_weight": 0.5}),
        ("code", {"warm_sandboxes": 0, "test_timeout_s": 99.0, "partial_credit": True}),
        ("service", {"max_turns": 9}),
    ],
)
def test_settings_of_execution_do_not_change_ids(name, change):
    assert make(name).task(0).id == make(name, change).task(0).id


def test_a_file_is_identified_by_name_in_any_folder(tmp_path):
    ids = set()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "a.jsonl"
        file.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
        ids.add(make("math-file", {"train_file": str(file), "verifier": "plain"}).task(0).id)
    assert len(ids) == 1


@pytest.mark.parametrize("name", REGISTRY)
def test_every_id_field_is_an_existing_setting(name):
    settings = REGISTRY[name].load()
    assert issubclass(settings, EnvSettings)
    assert set(settings.task_keys) <= set(settings.model_fields)
