"""How a world shows what to do, in one of several manners.

A demonstration is right in the end, but need not be a good way: some are terse, or guess, so that
reinforcement learning has something left to find out.
"""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from paddock.envs.env import Policy, Taskset, scripted_policy
from paddock.records import Dialogue, LossMaskSpan, Message, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationStyle:
    style: str  # one of the world's
    thinks: bool = True  # aloud, before each reply
    slips: bool = False  # takes a wrong step first and corrects it; the step is marked


class DemonstrationTaskset(Taskset, Protocol):
    """A world that can show how its tasks are done."""

    styles: tuple[str, ...]

    def demonstrate(self, task: Task, manner: DemonstrationStyle, chance: Random) -> Dialogue:
        """The task and what follows it, as its environment would have it. Wrong steps are marked
        as untrained."""


def self_correction(wrong: str, right: str) -> str:
    """A thought that begins wrongly and corrects itself."""
    return f"{wrong} , no , {right}"


def single_turn_dialogue(task: Task, answer: str, thought: str | None, wrong: str = "") -> Dialogue:
    """A dialogue of one reply. If `wrong` is said, the first time its thought says it is an error.

    >>> from paddock.records import Budget
    >>> task = Task(id="t", world="w", messages=(Message(role="user", content="?"),),
    ...             limits=Budget(turns=1, seconds=1, output_bytes=1))
    >>> single_turn_dialogue(task, "red", self_correction("it is blue", "it is red"), "it is blue").untrained
    (Untrained(message=1, part='reasoning', start=0, end=10),)
    """
    at = len(task.messages)
    untrained: tuple[LossMaskSpan, ...] = ()
    if wrong:
        start = (thought or "").index(wrong)
        span = LossMaskSpan(message=at, part="reasoning", start=start, end=start + len(wrong))
        untrained = (span,)
    messages = (*task.messages, Message(role="assistant", content=answer, reasoning=thought))
    return Dialogue(messages=messages, untrained=untrained, id=task.id, source=task.env)


def replay_policy(dialogue: Dialogue) -> Policy:
    """A player who says what the dialogue's replies say, in order."""
    return scripted_policy(
        *(message for message in dialogue.messages if message.role == "assistant")
    )
