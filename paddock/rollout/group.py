"""The attempts at one problem that are compared with each other."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paddock.records import Failure, Outcome, Trajectory
from paddock.rollout.settings import TaskSettings
from paddock.rollout.task_schedule import RolloutSpec


class RolloutFn(Protocol):
    """How a task is attempted: in this process, or by a service somewhere else."""

    async def __call__(self, given: RolloutSpec) -> Sequence[Trajectory]:
        """The branches of one session, at least one, all with the same outcome. What goes wrong
        with a world, an engine or a grader is a Failure; whatever is raised is a bug, and ends the
        run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """A problem, attempted `size` times. Every attempt is there, with a verdict or a failure."""

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
        """Of the weights that sampled any of its tokens."""
        return oldest_version(branch for branches in self.rollouts for branch in branches)


GroupFilterFn = Callable[[RolloutGroup], str]  # why a group has nothing to teach; nothing: it has


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One of the tasks of a run: how it is attempted, what it may use up, and which of its groups
    have nothing to teach."""

    rollout_fn: RolloutFn
    settings: TaskSettings
    group_filter: GroupFilterFn = lambda _: ""


def oldest_version(branches: Iterable[Trajectory]) -> int | None:
    versions = [branch.oldest_version for branch in branches]
    return min((version for version in versions if version is not None), default=None)


def group_failure_reason(outcomes: Sequence[Outcome]) -> str:
    """Why a group cannot be trained, or nothing if more than half of its attempts tell something
    about the policy. The others get no reward, not even zero.

    >>> from paddock.records import Verdict
    >>> full = Failure(kind="world", where="start", what="disk full")
    >>> group_failure_reason([Verdict(reward=0.0), full, full, Verdict(reward=1.0)])
    '2 of 4 attempts failed: world at start (2)'
    >>> group_failure_reason([Verdict(reward=0.0), full, Verdict(reward=1.0)])
    ''
    """
    lost = Counter(
        f"{outcome.kind} at {outcome.where}"
        for outcome in outcomes
        if isinstance(outcome, Failure) and not outcome.is_policy_failure
    )
    if 2 * lost.total() < len(outcomes):
        return ""
    reasons = ", ".join(f"{reason} ({count})" for reason, count in lost.most_common())
    return f"{lost.total()} of {len(outcomes)} attempts failed: {reasons}"
