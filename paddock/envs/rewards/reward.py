"""Reward functions and their weighted combination into a verdict."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paddock.records import Message, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a reward function scores."""

    messages: tuple[Message, ...]  # the whole conversation, the task's own messages first
    answer: str | None = None  # extracted from the last reply; None: not found
    reference: str = ""  # reference answer, if there is one

    @property
    def question(self) -> str:
        """The first user message."""
        return next((m.content for m in self.messages if m.role == "user"), "")

    @property
    def reply(self) -> str:
        """Content of the last reply, without tool calls and reasoning."""
        replies = [m.content for m in self.messages if m.role == "assistant"]
        return replies[-1] if replies else ""


@dataclass(frozen=True, slots=True)
class RewardScore:
    value: float  # 0 to 1, unless the reward function defines another range
    note: str = ""


class RewardFunc(Protocol):
    """Returns a score, or raises if it cannot score: an error is not a score of zero."""

    async def __call__(self, submission: Submission) -> RewardScore: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """A reward function with a weight. Weight 0: only recorded. `gate`: the score also multiplies
    the total reward, so that 0 here is 0 overall."""

    name: str
    func: RewardFunc
    weight: float = 1.0
    gate: bool = False


async def combine_rewards(parts: Sequence[WeightedReward], submission: Submission) -> Verdict:
    """Weighted sum of the rewards, multiplied by every gate; the verdict records each score."""
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"reward names must be unique, got {', '.join(names)}")
    scores = await asyncio.gather(*(part.func(submission) for part in parts))
    reward = sum(part.weight * s.value for part, s in zip(parts, scores, strict=True))
    for part, score in zip(parts, scores, strict=True):
        if part.gate:
            reward *= score.value
    return Verdict(
        reward=reward,
        parts={name: score.value for name, score in zip(names, scores, strict=True)},
        note="; ".join(f"{n}: {s.note}" for n, s in zip(names, scores, strict=True) if s.note),
    )
