from math import inf, nan

import pytest

from paddock.config import ConfigError, Recipe, dump_toml, load_recipe, resolve
from paddock.rl.alerts import HealthSignals, check_alerts
from paddock.rl.settings import AlertSettings, RLSettings
from paddock.rl.stages import STAGE_DEFAULTS, with_stage_defaults

MINIMAL = {
    "stage": "agentic",
    "steps": 8,
    "init": {"checkpoint": "runs/nano/sft"},
    "tasks": {"tools": {"env": "nano-tools"}},
}


def over(below, changes):
    """`changes` merged over `below`; None removes a key."""
    found = dict(below)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = over(found[name], value) if both else value
    return {name: value for name, value in found.items() if value is not None}


def settings(**changes):
    return resolve(RLSettings, with_stage_defaults(Recipe(over(MINIMAL, changes), {})))


@pytest.mark.parametrize("stage", [name for name in STAGE_DEFAULTS if name != "distill"])
def test_stage_defaults_are_those_of_the_paper(stage):
    found = settings(stage=stage)
    agentic = stage == "agentic"
    assert found.credit.advantage_norm == ("mean" if agentic else "std")
    assert found.loss.kind == ("double_sided" if agentic else "icepop")
    assert found.reset_optimizer is agentic
    assert found.freeze_indexer
    if not agentic:
        assert (found.loss.icepop_beta, found.loss.clip_low, found.loss.clip_high) == (
            2.0,
            0.2,
            0.28,
        )
        assert found.rollout.is_synchronous
        assert (found.tasks["tools"].group_size, found.rollout.groups_per_batch) == (32, 32)


def test_distillation_has_one_rollout_per_prompt():
    task = {"tools": {"env": "nano-tools", "teacher": "old"}}
    found = settings(stage="distill", tasks=task, teachers={"old": {"checkpoint": "x"}})
    assert found.tasks["tools"].group_size == 1
    assert found.rollout.groups_per_batch == 1024
    assert found.credit.keep_zero_variance


def test_a_recipe_overrides_the_defaults_of_its_stage():
    task = {"tools": {"env": "nano-tools", "group_size": 4}}
    found = settings(loss={"clip_low": 0.3}, tasks=task)
    assert (found.loss.kind, found.loss.clip_low, found.loss.clip_high) == (
        "double_sided",
        0.3,
        1.0,
    )
    assert found.tasks["tools"].group_size == 4


def test_a_resolved_recipe_resolves_to_itself(tmp_path):
    found = settings(loss={"clip_low": 0.3})
    (tmp_path / "recipe.toml").write_text(dump_toml(found))
    assert resolve(RLSettings, with_stage_defaults(load_recipe(tmp_path / "recipe.toml"))) == found


TEACHER = {"teachers": {"old": {"checkpoint": "x"}}}
DISTILL_RECIPE = {"tools": {"teacher": "old"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "agentc"}, "'agentc'; must be one of reasoning, agentic, general, distill"),
        ({"steps": 0}, "'steps' must be greater than 0"),
        ({"step": 4}, "unknown setting 'step'; did you mean 'steps'?"),
        ({"loss": {"clip_lwo": 0.1}}, "did you mean 'loss.clip_low'?"),
        ({"loss": {"clip_low": 1.5}}, "'loss.clip_low' must be less than or equal to 1"),
        ({"loss": {"icepop_beta": 0.5}}, "'loss.icepop_beta' must be greater than 1"),
        ({"loss": {"kind": "grpo"}}, "'loss.kind' must be"),
        ({"credit": {"advantage_norm": "median"}}, "'credit.advantage_norm' must be"),
        ({"credit": {"on_truncated": "drop"}}, "'credit.on_truncated' must be"),
        (
            {"rollout": {"max_staleness": -1}},
            "'rollout.max_staleness' must be greater than or equal to 0",
        ),
        ({"rollout": {"groups_per_batch": 0}}, "'rollout.groups_per_batch' must be greater than 0"),
        ({"rollout": {"sync_weights_every": 9}}, "'max_staleness' 4 is less than 8"),
        ({"rollout": {"deterministic": True}}, "'deterministic' needs order"),
        (
            {"rollout": {"updates_per_batch": 3, "max_staleness": 5}},
            "'steps' 8 must be a multiple of 'rollout.updates_per_batch'",
        ),
        (
            {"rollout": {"sync_weights_every": 4}, "checkpoint": {"every": 6}},
            "must be a multiple of",
        ),
        ({"tasks": {"tools": None}}, "'tasks' must not be empty"),
        ({"tasks": {"tools": {"ratio": 0}}}, "'ratio' is 0 for every task"),
        ({"tasks": {"tools": {"ratio": inf}}}, "'tasks.tools.ratio' must be a finite number"),
        ({"sampling": {"temperature": inf}}, "'sampling.temperature' must be a finite number"),
        (
            {"credit": {"reward": {"policy_failure_reward": nan}}},
            "must be a finite number, got nan",
        ),
        ({"stop_at_reward": nan}, "'stop_at_reward' must be a finite number"),
        ({"tasks": {"tools": {"evn": "x"}}}, "did you mean 'tasks.tools.env'?"),
        ({"tasks": {"tools": {"group_size": 1}}}, "has no baseline"),
        ({"tasks": {"tools": {"teacher": "old"}}}, "no teacher 'old'; 'teachers' has none"),
        ({"tasks": DISTILL_RECIPE, **TEACHER}, "its 'credit.keep_zero_variance' must be true"),
        (
            {
                "tasks": DISTILL_RECIPE,
                **TEACHER,
                "credit": {"keep_zero_variance": True},
                "sampling": {"temperature": 0.5},
            },
            "scores at temperature 1, but its sampling temperature is 0.5",
        ),
        ({"teachers": {"old": {}}}, "set either 'checkpoint' or 'url'"),
        ({"sampling": {"temperature": 0.0}}, "'sampling.temperature' must be greater than 0"),
        ({"optim": {"lr": "fast"}}, "'optim.lr' must be a number"),
        (
            {"init": {"preset": "nano", "checkpoint": None}},
            "RL starts from a checkpoint",
        ),
    ],
)
def test_an_invalid_setting_is_rejected_by_name(changes, message):
    with pytest.raises(ConfigError) as refusal:
        settings(**changes)
    assert message in str(refusal.value)


def test_a_recipe_without_a_stage_gets_the_list_of_stages():
    with pytest.raises(ConfigError, match="'stage' is missing; must be one of reasoning"):
        with_stage_defaults(Recipe({"steps": 1}, {}))


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"entropy": 0.001}, ["entropy collapse"]),
        ({"logprob_diff": 0.1}, ["train-inference mismatch"]),
        ({"logprob_diff": 0.1, "staleness": 2}, []),
        ({"logprob_diff": 0.9, "staleness": 2}, ["train-inference mismatch"]),
        ({"num_groups": 20, "num_zero_variance": 19}, ["too many zero-variance groups"]),
        ({"num_groups": 20, "num_zero_variance": 18}, []),
        ({"masked": 0.6}, ["too many masked tokens"]),
    ],
)
def test_alerts_are_raised_beyond_their_thresholds(changes, kinds):
    healthy = {
        "entropy": 0.5,
        "logprob_diff": 1e-6,
        "masked": 0.01,
        "num_groups": 10,
        "num_zero_variance": 2,
        "staleness": 0,
    }
    found = check_alerts(HealthSignals(**(healthy | changes)), AlertSettings())
    assert [alert.kind for alert in found] == kinds
