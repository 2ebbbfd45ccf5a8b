"""The task that rl_trl.py gives to both: words that mean nothing, of which even ones are wanted."""

import os
from collections.abc import Sequence
from functools import cache
from random import Random

VOCAB = 700
PROMPTS, GROUP, TOKENS = 16, 8, 24  # a step, single turn
TURNS, TURN_TOKENS = 3, 8  # with tools
ADDED = [1, 2, 3]  # what a world answers
LR = 1e-3


def confine(cores: int) -> None:
    """This process to so many cores, whatever threads it has."""
    mine = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, mine[:cores])


@cache
def prompt_of(number: int) -> list[int]:
    chance = Random(number)
    return [chance.randrange(4, VOCAB) for _ in range(12)]


def reward_of(ids: Sequence[int]) -> float:
    """The share of even tokens."""
    return sum(i % 2 == 0 for i in ids) / max(1, len(ids))


def latency_s(luck: str) -> float:
    """Of one answer of a world: 20 ms mostly, a second now and then (Pareto, cut at 1.5 s)."""
    return min(1.5, 0.02 * Random(luck).paretovariate(1.2))
