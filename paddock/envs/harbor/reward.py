"""Reward files of verifiers, and how rewards of several steps are combined."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Literal

Rewards = Mapping[str, float]


class RewardFileError(ValueError):
    """The verifier wrote no valid reward file."""


def parse_json(text: str) -> dict[str, float]:
    """The rewards of a reward.json: an object of numbers, or one number.

    >>> parse_json('{"correct": 1, "fast": 0.5}')
    {'correct': 1.0, 'fast': 0.5}
    >>> parse_json("1e309")
    Traceback (most recent call last):
    paddock.envs.harbor.reward.RewardFileError: reward.json: must be a finite number, got inf
    """
    if not text:
        raise RewardFileError("reward.json: empty")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RewardFileError(f"reward.json: {error}") from None
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards:
        raise RewardFileError("reward.json: must contain a reward")
    return {str(name): _number(value, "reward.json") for name, value in rewards.items()}


def parse_text(text: str) -> dict[str, float]:
    """The reward of a reward.txt: one number.

    >>> parse_text("0.5 ")
    {'reward': 0.5}
    """
    if not text:
        raise RewardFileError("reward.txt: empty")
    try:
        value = float(text)
    except ValueError:
        raise RewardFileError(f"reward.txt: must be a number, got {text.strip()[:40]!r}") from None
    return {"reward": _number(value, "reward.txt")}


def _number(value: object, where: str) -> float:
    # True passes: it is an int in Python, and Harbor accepts it.
    if not isinstance(value, int | float) or not isfinite(value):
        raise RewardFileError(f"{where}: must be a finite number, got {value!r}".replace("'", '"'))
    return float(value)


def scalar_reward(rewards: Rewards) -> float:
    """The reward for training: the key `reward` if there is one, else the mean of all.

    >>> scalar_reward({"correct": 1.0, "fast": 0.0})
    0.5
    """
    return rewards.get("reward", sum(rewards.values()) / len(rewards))


def meets_min_reward(rewards: Rewards | None, minimum: float | Mapping[str, float] | None) -> bool:
    """Whether the rewards reach a step's minimum. A missing reward never does."""
    if minimum is None:
        return True
    table = minimum if isinstance(minimum, Mapping) else {"reward": minimum}
    return rewards is not None and all(
        rewards.get(name, float("-inf")) >= value for name, value in table.items()
    )


def combine_step_rewards(
    steps: Sequence[Rewards | None], strategy: Literal["mean", "final"]
) -> dict[str, float] | None:
    """Rewards of a multi-step task: those of the last step, or the mean by key.

    In a mean a missing key counts as zero, and a step without rewards is ignored.

    >>> combine_step_rewards([{"reward": 1.0}, None, {"speed": 1.0}], "mean")
    {'reward': 0.5, 'speed': 0.5}
    """
    if strategy == "final":
        return dict(steps[-1]) if steps and steps[-1] is not None else None
    known = [rewards for rewards in steps if rewards is not None]
    names = dict.fromkeys(name for rewards in known for name in rewards)
    if not known:
        return None
    return {name: sum(each.get(name, 0.0) for each in known) / len(known) for name in names}
