"""What an answer is worth, part by part: the one interface of rules, models and judges."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paddock.records import Message, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a scorer looks at."""

    messages: tuple[Message, ...]  # the whole conversation, the task's own messages first
    answer: str | None = None  # what the world found in the last reply; None: nothing
    reference: str = ""  # the right answer, where there is one

    @property
    def question(self) -> str:
        """What was asked first."""
        return next((m.content for m in self.messages if m.role == "user"), "")

    @property
    def reply(self) -> str:
        """What was said last, calls and reasoning apart."""
        said = [m.content for m in self.messages if m.role == "assistant"]
        return said[-1] if said else ""


@dataclass(frozen=True, slots=True)
class RewardScore:
    value: float  # 0 to 1, unless the scorer says otherwise
    note: str = ""


class RewardFunc(Protocol):
    """Gives a score, or raises: a scorer that cannot work has no opinion, not even zero."""

    async def __call__(self, work: Submission) -> RewardScore: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """A scorer with its say. With weight 0 it is only recorded; `needed`, it multiplies the
    reward, so that a zero here is a zero in all."""

    name: str
    scorer: RewardFunc
    weight: float = 1.0
    needed: bool = False


async def combine_rewards(parts: Sequence[WeightedReward], work: Submission) -> Verdict:
    """The weighted sum of the parts, times every part that is needed; each part on record."""
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"parts: two are called the same among {', '.join(names)}")
    scores = await asyncio.gather(*(part.scorer(work) for part in parts))
    reward = sum(part.weight * s.value for part, s in zip(parts, scores, strict=True))
    for part, score in zip(parts, scores, strict=True):
        if part.needed:
            reward *= score.value
    return Verdict(
        reward=reward,
        parts={name: score.value for name, score in zip(names, scores, strict=True)},
        note="; ".join(f"{n}: {s.note}" for n, s in zip(names, scores, strict=True) if s.note),
    )
