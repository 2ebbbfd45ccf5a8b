"""Reward files: what a verifier leaves behind, and what several of them are worth together."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Literal

Rewards = Mapping[str, float]


class RewardFileError(ValueError):
    """A verifier that left no reward that can be read."""


def parse_json(text: str) -> dict[str, float]:
    """
    >>> parse_json('{"correct": 1, "fast": 0.5}')
    {'correct': 1.0, 'fast': 0.5}
    >>> parse_json("1e309")
    Traceback (most recent call last):
    paddock.envs.harbor.reward.RewardError: reward.json: inf is no finite number
    """
    if not text:
        raise RewardFileError("reward.json: empty")
    try:
        said = json.loads(text)
    except ValueError as error:
        raise RewardFileError(f"reward.json: {error}") from None
    table = said if isinstance(said, dict) else {"reward": said}
    if not table:
        raise RewardFileError("reward.json: no reward in it")
    return {str(name): _number(value, "reward.json") for name, value in table.items()}


def parse_text(text: str) -> dict[str, float]:
    """
    >>> parse_text("0.5 ")
    {'reward': 0.5}
    """
    if not text:
        raise RewardFileError("reward.txt: empty")
    try:
        value = float(text)
    except ValueError:
        raise RewardFileError(f"reward.txt: {text.strip()[:40]!r} is no number") from None
    return {"reward": _number(value, "reward.txt")}


def _number(value: object, where: str) -> float:
    # To Python True is a number, and Harbor takes it for one.
    if not isinstance(value, int | float) or not isfinite(value):
        raise RewardFileError(f"{where}: {value!r} is no finite number".replace("'", '"'))
    return float(value)


def scalar_reward(rewards: Rewards) -> float:
    """One number for training: `reward` if there is one, else the mean of all.

    >>> scalar_reward({"correct": 1.0, "fast": 0.0})
    0.5
    """
    return rewards.get("reward", sum(rewards.values()) / len(rewards))


def meets_min_reward(rewards: Rewards | None, least: float | Mapping[str, float] | None) -> bool:
    """Whether a step is good enough to go on. What is missing is worth less than anything."""
    if least is None:
        return True
    table = least if isinstance(least, Mapping) else {"reward": least}
    return rewards is not None and all(
        rewards.get(name, float("-inf")) >= value for name, value in table.items()
    )


def combine_step_rewards(
    steps: Sequence[Rewards | None], strategy: Literal["mean", "final"]
) -> dict[str, float] | None:
    """What the steps of a task are worth: the last one's rewards, or the mean by key. In a mean a
    missing key counts zero and a step without a result does not count.

    >>> combine_step_rewards([{"reward": 1.0}, None, {"speed": 1.0}], "mean")
    {'reward': 0.5, 'speed': 0.5}
    """
    if strategy == "final":
        return dict(steps[-1]) if steps and steps[-1] is not None else None
    there = [rewards for rewards in steps if rewards is not None]
    names = dict.fromkeys(name for rewards in there for name in rewards)
    if not there:
        return None
    return {name: sum(each.get(name, 0.0) for each in there) / len(there) for name in names}
