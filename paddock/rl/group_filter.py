"""Which finished groups are worth training on, and how all of them did, trained or not."""

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
    """What ended between two batches."""

    rewards: Mapping[str, float]  # mean by task, of every attempt that has one
    num_rollouts: int
    num_groups: int  # groups
    num_zero_variance: (
        int  # of them, those that were not trained because their rewards are all equal
    )
    num_truncated: int  # attempts
    failures: Mapping[str, int]  # attempts by kind

    @property
    def reward(self) -> float | None:
        """The mean over tasks, each alike."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None


@dataclass(slots=True)
class GroupFilter:
    """The collector's `sift`: says why a group is not trained, and keeps count. What the world said
    counts as reward here, before any rule about length or failures."""

    settings: RLSettings
    _rewards: dict[str, list[float]] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _failures: Counter[str] = field(default_factory=Counter)

    def __call__(self, group: RolloutGroup) -> str:
        judgement = assign_credit(group.rollouts, group.size, self.settings.credit_for(group.task))
        self._counts.update(
            attempts=len(group.rollouts),
            judged=1,
            flat=int(judgement.skip_reason == "zero variance"),
            truncated=judgement.truncated,
        )
        for attempt in group.rollouts:
            outcome = attempt[0].outcome
            if isinstance(outcome, Verdict):
                self._rewards.setdefault(group.task, []).append(outcome.reward)
            else:
                self._failures[outcome.kind] += 1
                if outcome.is_policy_failure:
                    rule = self.settings.credit_for(group.task).reward
                    self._rewards.setdefault(group.task, []).append(rule.policy_failure_reward)
        return judgement.skip_reason

    def state_dict(self) -> dict[str, Any]:
        """What was counted and not taken yet, as JSON."""
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
        """What was counted since the last time."""
        found = RolloutStats(
            rewards={task: sum(all_) / len(all_) for task, all_ in sorted(self._rewards.items())},
            num_rollouts=self._counts["attempts"],
            num_groups=self._counts["judged"],
            num_zero_variance=self._counts["flat"],
            num_truncated=self._counts["truncated"],
            failures=dict(self._failures),
        )
        self._rewards.clear()
        self._counts.clear()
        self._failures.clear()
        return found
