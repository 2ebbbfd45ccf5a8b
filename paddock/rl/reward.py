"""Reward of a rollout for training: verdict, overlong penalty, reward of policy failures."""

from paddock.records import Trajectory, Verdict
from paddock.rl.settings import RewardSettings

Rollout = tuple[Trajectory, ...]  # the branches of one session; they share its outcome


def compute_reward(rollout: Rollout, settings: RewardSettings) -> float | None:
    """The reward of a rollout; None if it failed through no fault of the policy.

    A verdict counts as it is, minus the overlong penalty. A failure of the policy counts as
    `settings.policy_failure_reward`.
    """
    outcome = rollout[0].outcome
    if isinstance(outcome, Verdict):
        if settings.overlong_start is None:  # no penalty: skip counting tokens
            return outcome.reward
        return outcome.reward - overlong_penalty(num_sampled_tokens(rollout), settings)
    return settings.policy_failure_reward if outcome.is_policy_failure else None


def overlong_penalty(num_tokens: int, settings: RewardSettings) -> float:
    """DAPO's soft overlong penalty.

    0 up to `overlong_start` sampled tokens, then linear up to `overlong_penalty` at `overlong_end`.

    >>> settings = RewardSettings(overlong_start=100, overlong_end=200, overlong_penalty=0.5)
    >>> [overlong_penalty(num_tokens, settings) for num_tokens in (100, 150, 999)]
    [0.0, 0.25, 0.5]
    """
    if settings.overlong_start is None or settings.overlong_end is None:
        return 0.0
    length = settings.overlong_end - settings.overlong_start
    share = (num_tokens - settings.overlong_start) / length
    return settings.overlong_penalty * min(1.0, max(0.0, share))


def num_sampled_tokens(rollout: Rollout) -> int:
    """Tokens that the policy sampled, each counted once over all branches."""
    return sum(sum(branch.loss_mask) for branch in rollout)


def is_truncated(rollout: Rollout) -> bool:
    """Whether the last reply of any branch reached its token limit."""
    return any(
        branch.turns and branch.turns[-1].completion.finish == "length" for branch in rollout
    )
