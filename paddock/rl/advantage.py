"""How much better than expected an attempt was, and groups that lost some of theirs.

G attempts of a group, T tokens of an attempt.
"""

from collections.abc import Sequence
from math import fsum, sqrt
from statistics import fmean
from typing import Literal, TypeVar

AdvantageNorm = Literal["std", "mean"]
_A = TypeVar("_A")

ZERO_VARIANCE_TOLERANCE = (
    1e-9  # rewards that differ by less say nothing about which attempt was better
)


def group_advantages(reward_G: Sequence[float], *, baseline: AdvantageNorm) -> list[float]:
    """How much better than its siblings each attempt did.

    mean  r - mean(r), as in agentic RL
    std   the same in standard deviations of the group, as in reasoning RL

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], baseline="std")
    [1.0, -1.0, -1.0, 1.0]
    >>> group_advantages([1.0, 0.0, 0.0, 0.0], baseline="mean")
    [0.75, -0.25, -0.25, -0.25]
    >>> group_advantages([1.0, 1.0], baseline="std")
    [0.0, 0.0]
    """
    if is_zero_variance(reward_G):
        return [0.0] * len(reward_G)
    mean = fmean(reward_G)
    spread = sqrt(fsum((reward - mean) ** 2 for reward in reward_G) / len(reward_G))
    scale = spread if baseline == "std" else 1.0
    return [(reward - mean) / scale for reward in reward_G]


def is_zero_variance(reward_G: Sequence[float]) -> bool:
    """Whether the group has nothing to teach: all did equally well."""
    return not reward_G or max(reward_G) - min(reward_G) < ZERO_VARIANCE_TOLERANCE


def pad_group(valid: Sequence[_A], size: int) -> list[_A] | None:
    """A group of `size` again, after some attempts failed through no fault of the policy: valid
    ones are repeated in turn if they are more than half of it, else there is no group (None).

    >>> pad_group(["a", "b", "c"], 5)
    ['a', 'b', 'c', 'a', 'b']
    >>> pad_group(["a", "b"], 4) is None
    True
    """
    if 2 * len(valid) <= size:
        return None
    return [valid[place % len(valid)] for place in range(size)]


def gae(
    reward_T: Sequence[float], value_T: Sequence[float], *, discount: float, trace: float
) -> list[float]:
    """Of each token, against what a critic expected of the state before it (GAE).

    `value_T[t]` is the critic's opinion before token t; behind the last token the attempt is over
    and worth nothing more. With `trace` 1 and `discount` 1 it is the return minus the value.

    >>> gae([0.0, 1.0], [0.5, 0.75], discount=1.0, trace=1.0)
    [0.5, 0.25]
    """
    found: list[float] = []
    later = value_after = 0.0
    for reward, value in zip(reversed(reward_T), reversed(value_T), strict=True):
        surprise = reward + discount * value_after - value
        later = surprise + discount * trace * later
        value_after = value
        found.append(later)
    return found[::-1]
