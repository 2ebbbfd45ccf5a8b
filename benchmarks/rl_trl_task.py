"""The task of rl_trl.py: random prompts of tokens; the reward is the share of even tokens."""

import os
from collections.abc import Sequence
from functools import cache
from random import Random

VOCAB = 700
PROMPTS, GROUP, TOKENS = 16, 8, 24  # per step, single turn
TURNS, TURN_TOKENS = 3, 8  # with tools
ADDED = [1, 2, 3]  # tokens of a tool result
LR = 1e-3


def limit_cores(cores: int) -> None:
    """Pin this process to so many cores, however many threads it has."""
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, available[:cores])


@cache
def prompt_of(number: int) -> list[int]:
    rng = Random(number)
    return [rng.randrange(4, VOCAB) for _ in range(12)]


def reward_of(ids: Sequence[int]) -> float:
    """The share of even tokens."""
    return sum(i % 2 == 0 for i in ids) / max(1, len(ids))


def latency_s(seed: str) -> float:
    """Seconds of a tool call: mostly 20 ms, sometimes a second (Pareto, capped at 1.5 s)."""
    return min(1.5, 0.02 * Random(seed).paretovariate(1.2))
