from math import inf, isfinite, nan
from typing import get_args

import pytest

from paddock.records import Budget, Failure, FailureKind, Message, Task, Verdict
from paddock.records.task import MAX_ABS_REWARD
from paddock.rl.advantage import group_advantages

BUDGET = Budget(turns=4, seconds=30.0, output_bytes=4096)
PROMPT = (Message(role="user", content="2+2?"),)


@pytest.mark.parametrize("limit", ["turns", "seconds", "output_bytes"])
@pytest.mark.parametrize("value", [0, -1, inf, nan])
def test_an_infinite_or_empty_budget_is_rejected(limit, value):
    with pytest.raises(ValueError, match=f"^{limit}: "):
        Budget(**{"turns": 1, "seconds": 1.0, "output_bytes": 1, limit: value})


@pytest.mark.parametrize("field", ["id", "env", "messages"])
def test_a_task_needs_id_env_and_messages(field):
    given = {"id": "sum/1", "env": "math", "messages": PROMPT, "budget": BUDGET}
    with pytest.raises(ValueError, match=f"^{field}: must not be empty"):
        Task(**given | {field: type(given[field])()})


def test_a_reward_that_is_not_a_number_is_rejected():
    with pytest.raises(ValueError, match=r"^reward: "):
        Verdict(reward=nan)
    with pytest.raises(ValueError, match=r"^parts: style must be finite, got inf"):
        Verdict(reward=0.0, parts={"tests": 1.0, "style": inf})


@pytest.mark.parametrize("reward", [1e308, -1e308, 1.01e6, 10**400], ids=lambda r: f"{r!s:.8}")
def test_a_reward_out_of_range_is_rejected(reward):
    """Squared, such a number would overflow in the computation of advantages."""
    with pytest.raises(ValueError, match=r"^reward: must be in \[-1e\+06, 1e\+06\], got "):
        Verdict(reward=reward)


def test_rewards_at_the_limits_have_finite_advantages():
    ends = [Verdict(reward=end).reward for end in (-MAX_ABS_REWARD, MAX_ABS_REWARD)]
    for baseline in ("std", "mean"):
        assert all(map(isfinite, group_advantages(ends, norm=baseline)))


def test_only_kind_policy_is_a_policy_failure():
    blamed = [
        kind
        for kind in get_args(FailureKind)
        if Failure(kind=kind, where="step", what="broke").is_policy_failure
    ]
    assert blamed == ["policy"]


def test_an_unknown_failure_kind_is_rejected():
    with pytest.raises(ValueError, match=r"^kind: must be one of policy, world"):
        Failure(kind="weather", where="", what="")


def test_a_failure_has_no_reward():
    assert not hasattr(Failure(kind="world", where="sandbox", what="disk full"), "reward")
