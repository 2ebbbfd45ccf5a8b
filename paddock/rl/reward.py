"""What an attempt earned, as training counts it. A broken world earns nothing, not even zero."""

from paddock.records import Trajectory, Verdict
from paddock.rl.settings import RewardSettings

Rollout = tuple[Trajectory, ...]  # the branches of one session; they share its outcome


def compute_reward(attempt: Rollout, rule: RewardSettings) -> float | None:
    """The attempt's reward; None if nobody can say what the policy deserves.

    A verdict counts as it is, less a penalty for length. A failure counts only where the policy is
    to blame, with `rule.policy_failure`.
    """
    outcome = attempt[0].outcome
    if isinstance(outcome, Verdict):
        if rule.overlong_start is None:  # nobody asks how long it was
            return outcome.reward
        return outcome.reward - overlong_penalty(num_sampled_tokens(attempt), rule)
    return rule.policy_failure_reward if outcome.is_policy_failure else None


def overlong_penalty(tokens: int, rule: RewardSettings) -> float:
    """Nothing up to `overlong_from` sampled tokens, then in proportion up to `overlong_penalty` at
    `overlong_at` and beyond.

    >>> rule = RewardSettings(overlong_from=100, overlong_at=200, overlong_penalty=0.5)
    >>> [overlong_penalty(tokens, rule) for tokens in (100, 150, 999)]
    [0.0, 0.25, 0.5]
    """
    if rule.overlong_start is None or rule.overlong_end is None:
        return 0.0
    share = (tokens - rule.overlong_start) / (rule.overlong_end - rule.overlong_start)
    return rule.overlong_penalty * min(1.0, max(0.0, share))


def num_sampled_tokens(attempt: Rollout) -> int:
    """What the policy wrote, each token once over all branches."""
    return sum(sum(branch.loss_mask) for branch in attempt)


def is_truncated(attempt: Rollout) -> bool:
    """Whether any branch ended because its last reply reached a limit."""
    return any(
        branch.turns and branch.turns[-1].completion.finish == "length" for branch in attempt
    )
