"""Advantages: GRPO group-relative advantages, padding of groups with failed rollouts, and GAE.

G rollouts of a group, T tokens of a rollout.
"""

from collections.abc import Sequence
from math import fsum, sqrt
from statistics import fmean
from typing import Literal, TypeVar

AdvantageNorm = Literal["std", "mean"]
_A = TypeVar("_A")

# Rewards that differ by less are rounding, not evidence that one rollout was better.
ZERO_VARIANCE_TOLERANCE = 1e-9


def group_advantages(reward_G: Sequence[float], *, norm: AdvantageNorm) -> list[float]:
    """The advantage of each rollout over its group.

    mean  r - mean(r), as in agentic RL
    std   (r - mean(r)) / std(r), as in reasoning RL

    A zero-variance group has advantages of 0.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], norm="std")
    [1.0, -1.0, -1.0, 1.0]
    >>> group_advantages([1.0, 0.0, 0.0, 0.0], norm="mean")
    [0.75, -0.25, -0.25, -0.25]
    >>> group_advantages([1.0, 1.0], norm="std")
    [0.0, 0.0]
    """
    if is_zero_variance(reward_G):
        return [0.0] * len(reward_G)
    mean = fmean(reward_G)
    std = sqrt(fsum((reward - mean) ** 2 for reward in reward_G) / len(reward_G))
    scale = std if norm == "std" else 1.0
    return [(reward - mean) / scale for reward in reward_G]


def is_zero_variance(reward_G: Sequence[float]) -> bool:
    """Whether all rewards are equal: in a zero-variance group no rollout has an advantage."""
    return not reward_G or max(reward_G) - min(reward_G) < ZERO_VARIANCE_TOLERANCE


def pad_group(valid: Sequence[_A], size: int) -> list[_A] | None:
    """Pad a group back to `size` rollouts by repeating the valid ones in turn.

    Returns None if at most half of the group is valid.

    >>> pad_group(["a", "b", "c"], 5)
    ['a', 'b', 'c', 'a', 'b']
    >>> pad_group(["a", "b"], 4) is None
    True
    """
    if 2 * len(valid) <= size:
        return None
    return [valid[index % len(valid)] for index in range(size)]


def gae(
    reward_T: Sequence[float], value_T: Sequence[float], *, gamma: float, lam: float
) -> list[float]:
    """Generalized advantage estimation, one advantage per token.

    `value_T[t]` is the critic's value of the state before token t; the value after the last token
    is 0. With `gamma` 1 and `lam` 1 the advantage is the return minus the value.

    >>> gae([0.0, 1.0], [0.5, 0.75], gamma=1.0, lam=1.0)
    [0.5, 0.25]
    """
    advantages: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(reversed(reward_T), reversed(value_T), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * advantage
        next_value = value
        advantages.append(advantage)
    return advantages[::-1]
