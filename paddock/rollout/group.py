"""Rollout groups: rollouts of one task that share a baseline, and how a task is run."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from paddock.records import Failure, Outcome, Trajectory, Verdict
from paddock.rollout.settings import TaskSettings
from paddock.rollout.task_schedule import RolloutSpec


class RolloutFn(Protocol):
    """Runs one rollout of a task, in this process or on a task service."""

    async def __call__(self, spec: RolloutSpec, /) -> Sequence[Trajectory]:
        """The branches of one session, at least one, all with the same outcome.

        Errors of environment, engine or grader are a Failure outcome. An exception is a bug and
        ends the run.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All `size` rollouts of one problem, each with a verdict or a failure."""

    ordinal: int
    task: str
    number: int
    rollouts: tuple[tuple[Trajectory, ...], ...]  # by member; of each, the branches of its session

    @property
    def size(self) -> int:
        return len(self.rollouts)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(branches[0].outcome for branches in self.rollouts)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled any of its tokens."""
        return oldest_version(branch for branches in self.rollouts for branch in branches)


GroupFilterFn = Callable[[RolloutGroup], str]  # why a group is not trained; empty: it is


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One task of a run: how to run a rollout, its settings, and which groups are filtered.

    With `num_prompts`, the numbers n, n + num_prompts, ... are one prompt.
    """

    rollout_fn: RolloutFn
    settings: TaskSettings
    group_filter: GroupFilterFn = lambda _: ""
    num_prompts: int | None = None


def oldest_version(branches: Iterable[Trajectory]) -> int | None:
    versions = [branch.oldest_version for branch in branches]
    return min((version for version in versions if version is not None), default=None)


def group_rewards(outcomes: Sequence[Outcome]) -> list[float]:
    """Rewards of a group: -inf for a failure of the policy, nothing for another failure."""
    return [
        outcome.reward if isinstance(outcome, Verdict) else -inf
        for outcome in outcomes
        if isinstance(outcome, Verdict) or outcome.is_policy_failure
    ]


def group_failure_reason(outcomes: Sequence[Outcome]) -> str:
    """Why a group failed; empty if more than half of its rollouts are valid.

    Rollouts that failed through no fault of the policy have no reward, not even zero.

    >>> from paddock.records import Verdict
    >>> full = Failure(kind="world", where="start", what="disk full")
    >>> group_failure_reason([Verdict(reward=0.0), full, full, Verdict(reward=1.0)])
    '2 of 4 rollouts failed: environment at start (2)'
    >>> group_failure_reason([Verdict(reward=0.0), full, Verdict(reward=1.0)])
    ''
    """
    lost = Counter(
        outcome.label
        for outcome in outcomes
        if isinstance(outcome, Failure) and not outcome.is_policy_failure
    )
    if 2 * lost.total() < len(outcomes):
        return ""
    reasons = ", ".join(f"{reason} ({count})" for reason, count in lost.most_common())
    return f"{lost.total()} of {len(outcomes)} rollouts failed: {reasons}"
