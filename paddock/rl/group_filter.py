"""Group filter (rejection sampling of groups, as in DAPO) and statistics between batches."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paddock.records import Verdict
from paddock.rl.credit import assign_credit
from paddock.rl.settings import RLSettings
from paddock.rollout import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Statistics of the groups that ended between two batches, trained or not."""

    rewards: Mapping[str, float]  # mean by task, of every rollout with a reward
    num_rollouts: int
    num_groups: int
    num_zero_variance: int  # groups skipped because all rewards are equal
    num_truncated: int  # rollouts
    failures: Mapping[str, int]  # rollouts by failure kind

    @property
    def reward(self) -> float | None:
        """The mean over tasks, each with the same weight."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None


@dataclass(slots=True)
class GroupFilter:
    """The orchestrator's group filter: returns why a group is not trained, and keeps statistics.

    Rewards are counted as the environment scored them, before the overlong penalty.
    """

    settings: RLSettings
    _rewards: dict[str, list[float]] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _failures: Counter[str] = field(default_factory=Counter)

    def __call__(self, group: RolloutGroup) -> str:
        credit = assign_credit(group.rollouts, group.size, self.settings.credit_for(group.task))
        # The names of the counts are stored in checkpoints.
        self._counts.update(
            attempts=len(group.rollouts),
            judged=1,
            flat=int(credit.skip_reason == "zero variance"),
            truncated=credit.truncated,
        )
        for rollout in group.rollouts:
            outcome = rollout[0].outcome
            if isinstance(outcome, Verdict):
                self._rewards.setdefault(group.task, []).append(outcome.reward)
            else:
                self._failures[outcome.kind] += 1
                if outcome.is_policy_failure:
                    reward = self.settings.credit_for(group.task).reward.policy_failure_reward
                    self._rewards.setdefault(group.task, []).append(reward)
        return credit.skip_reason

    def state_dict(self) -> dict[str, Any]:
        """The statistics since the last `pop_stats`, as JSON."""
        return {
            "rewards": self._rewards,
            "counts": dict(self._counts),
            "failures": dict(self._failures),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rewards = {task: list(rewards) for task, rewards in state["rewards"].items()}
        self._counts = Counter(state["counts"])
        self._failures = Counter(state["failures"])

    def pop_stats(self) -> RolloutStats:
        """The statistics since the last call, which are then reset."""
        stats = RolloutStats(
            rewards={task: sum(each) / len(each) for task, each in sorted(self._rewards.items())},
            num_rollouts=self._counts["attempts"],
            num_groups=self._counts["judged"],
            num_zero_variance=self._counts["flat"],
            num_truncated=self._counts["truncated"],
            failures=dict(self._failures),
        )
        self._rewards.clear()
        self._counts.clear()
        self._failures.clear()
        return stats
