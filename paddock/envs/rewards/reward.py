"""Reward functions and their weighted combination into a verdict."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paddock.envs.env import RolloutFailed
from paddock.records import Message, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a reward function scores."""

    messages: tuple[Message, ...]  # the whole conversation, the task's own messages first
    answer: str | None = None  # extracted from the last reply; None: not found
    reference: str = ""  # reference answer, if there is one
    prompt_length: int = 1  # messages of the task, before the first reply
    # Of the row of the task, as its data file has them; "prompt" is a string or a list of messages.
    columns: Mapping[str, Any] = field(default_factory=dict)

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
    applies: bool = True  # False: it does not count


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
    """Weighted sum of the rewards, multiplied by every gate; the verdict records each score.

    What does not apply is left out. RolloutFailed if nothing with a weight applies.
    """
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"reward names must be unique, got {', '.join(names)}")
    scores = await asyncio.gather(*(part.func(submission) for part in parts))
    found = [(part, s) for part, s in zip(parts, scores, strict=True) if s.applies]
    if len(found) < len(parts) and not any(part.weight for part, _ in found):
        raise RolloutFailed("grader", "rewards", "no reward function applies to this task")
    reward = sum(part.weight * score.value for part, score in found)
    for part, score in found:
        if part.gate:
            reward *= score.value
    return Verdict(
        reward=reward,
        parts={part.name: score.value for part, score in found},
        note="; ".join(f"{part.name}: {score.note}" for part, score in found if score.note),
    )
