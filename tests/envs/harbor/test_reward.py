import pytest

from paddock.envs.harbor.failures import FAILURE_POLICIES
from paddock.envs.harbor.reward import (
    RewardFileError,
    combine_step_rewards,
    meets_min_reward,
    parse_json,
    parse_text,
    scalar_reward,
)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '"1"', '{"a": "1"}', '{"a": null}', '{"a": NaN}', "1e309", "{"]
)
def test_an_invalid_reward_is_rejected(text):
    with pytest.raises(RewardFileError, match=r"reward\.json: "):
        parse_json(text)


@pytest.mark.parametrize("text", ["", "nan", "inf", "1e309", "one", "1 2"])
def test_a_reward_that_is_not_a_number_is_rejected(text):
    with pytest.raises(RewardFileError, match=r"reward\.txt: "):
        parse_text(text)


def test_rewards_are_read():
    assert parse_json('{"a": 1, "b": -0.5}') == {"a": 1.0, "b": -0.5}
    assert parse_json("0.25") == {"reward": 0.25}
    assert parse_text(" 1\n") == {"reward": 1.0}
    assert scalar_reward({"reward": 0.25, "speed": 1.0}) == 0.25


@pytest.mark.parametrize(
    ("rewards", "min_reward", "good"),
    [
        ({"reward": 0.5}, None, True),
        (None, None, True),
        ({"reward": 0.5}, 0.5, True),
        ({"reward": 0.4}, 0.5, False),
        ({"speed": 1.0}, 0.5, False),
        (None, 0.0, False),
        ({"a": 1.0, "b": 0.0}, {"a": 1.0}, True),
        ({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.5}, False),
    ],
)
def test_a_step_passes_by_every_key(rewards, min_reward, good):
    assert meets_min_reward(rewards, min_reward) is good


def test_rewards_of_steps_are_combined():
    steps = [{"reward": 1.0}, {"reward": 0.0, "speed": 1.0}]
    assert combine_step_rewards(steps, "mean") == {"reward": 0.5, "speed": 0.5}
    assert combine_step_rewards(steps, "final") == {"reward": 0.0, "speed": 1.0}
    assert combine_step_rewards([*steps, None], "final") is None
    assert combine_step_rewards([None], "mean") is None


def test_only_endings_caused_by_the_policy_are_verdicts():
    trusted = {cause for cause, meaning in FAILURE_POLICIES.items() if meaning.trusted}
    assert trusted == {"agent_exhausted_budget", "agent_refused_task"}
    assert all((meaning.kind is None) == meaning.trusted for meaning in FAILURE_POLICIES.values())
    assert "policy" not in {meaning.kind for meaning in FAILURE_POLICIES.values()}
