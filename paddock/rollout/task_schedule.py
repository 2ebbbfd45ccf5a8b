"""Deterministic task schedule and rollout seeds: both are computed, never drawn at random."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from statistics import fmean

from paddock.records import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """One rollout to run. The same run derives the same specs, whatever their outcomes.

    >>> RolloutSpec.derive("sums", 17, 3, seed=1).session_id
    'sums-17-3'
    """

    task: str
    number: int  # index of the problem, from 0
    member: int  # index of the rollout in its group, from 0
    seed: int  # of its sampling

    @classmethod
    def derive(cls, task: str, number: int, member: int, *, seed: int) -> "RolloutSpec":
        """Derive the rollout's seed from that of the run."""
        text = f"{seed}\0{task}\0{number}\0{member}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        own = int.from_bytes(digest, "little") % SamplingParams.MAX_SEED
        return cls(task=task, number=number, member=member, seed=own)

    @property
    def task_id(self) -> str:
        return f"{self.task}/{self.number}"

    @property
    def group_id(self) -> str:
        return f"{self.task}-{self.number}"

    @property
    def session_id(self) -> str:
        return f"{self.group_id}-{self.member}"


def next_task(
    weights: Mapping[str, float],
    taken: Mapping[str, float],
    among: Collection[str],
    costs: Mapping[str, float] | None = None,
) -> str | None:
    """The task furthest behind its weight, the first of equals; None if no task of `among` has one.

    `taken` counts groups, or whatever `costs` says that a group of each task counts.

    >>> weights, taken = {"math": 0.5, "code": 0.25, "search": 0.25}, {}
    >>> for _ in range(8):
    ...     task = next_task(weights, taken, weights)
    ...     taken[task] = taken.get(task, 0) + 1
    >>> taken
    {'math': 4, 'code': 2, 'search': 2}
    """
    whole = sum(weights.values())
    step = fmean(costs[task] for task in weights) if costs else 1
    done = sum(taken.get(task, 0) for task in weights) + step
    best, behind = None, float("-inf")
    for task, weight in weights.items():
        lack = done * weight / whole - taken.get(task, 0) if weight > 0 else float("-inf")
        if task in among and lack > behind:
            best, behind = task, lack
    return best


def next_tasks(
    weights: Mapping[str, float],
    taken: Mapping[str, float],
    count: int,
    costs: Mapping[str, float] | None = None,
) -> Sequence[str]:
    """The next `count` tasks in order.

    >>> next_tasks({"a": 2.0, "b": 1.0}, {}, 6)
    ('a', 'b', 'a', 'a', 'b', 'a')
    >>> next_tasks({"a": 1.0, "b": 1.0}, {}, 6, costs={"a": 1.0, "b": 4.0})
    ('a', 'b', 'a', 'a', 'a', 'a')
    """
    each = tuple((costs or dict.fromkeys(weights, 1)).items())
    return _next_tasks(tuple(weights.items()), tuple(sorted(taken.items())), each, count)


@lru_cache(maxsize=16)  # called repeatedly between batches
def _next_tasks(
    weights: tuple[tuple[str, float], ...],
    taken: tuple[tuple[str, float], ...],
    costs: tuple[tuple[str, float], ...],
    count: int,
) -> Sequence[str]:
    shares, filled, cost_of, found = dict(weights), dict(taken), dict(costs), []
    for _ in range(count):
        task = next_task(shares, filled, shares, cost_of)
        if task is None:
            break
        filled[task] = filled.get(task, 0) + cost_of[task]
        found.append(task)
    return tuple(found)
