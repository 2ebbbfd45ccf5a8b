"""Demonstrations: how an environment shows solutions of its tasks, in one of several styles.

A demonstration ends with the right answer but need not be a good solution: some are terse or guess,
which leaves reinforcement learning something to improve.
"""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from paddock.envs.env import Policy, Taskset, scripted_policy
from paddock.records import Dialogue, LossMaskSpan, Message, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationStyle:
    style: str  # one of the environment's styles
    thinks: bool = True  # with reasoning before each reply
    makes_mistake: bool = False  # a wrong step first, then corrected; the wrong step is untrained


class DemonstrationTaskset(Taskset, Protocol):
    """An environment that can demonstrate solutions."""

    styles: tuple[str, ...]

    def demonstrate(self, task: Task, style: DemonstrationStyle, rng: Random) -> Dialogue:
        """The task's messages and a solution as the environment would play it. Wrong steps are in
        `untrained`."""


def self_correction(wrong: str, right: str) -> str:
    """Reasoning that begins with a mistake and corrects it."""
    return f"{wrong} , no , {right}"


def single_turn_dialogue(task: Task, answer: str, thought: str | None, wrong: str = "") -> Dialogue:
    """A dialogue with one reply. The first occurrence of `wrong` in the reasoning is untrained.

    >>> from paddock.records import Budget
    >>> task = Task(id="t", env="w", messages=(Message(role="user", content="?"),),
    ...             budget=Budget(turns=1, seconds=1, output_bytes=1))
    >>> thought = self_correction("it is blue", "it is red")
    >>> single_turn_dialogue(task, "red", thought, "it is blue").untrained
    (LossMaskSpan(message=1, part='reasoning', start=0, end=10),)
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
    """A policy that gives the replies of the dialogue in order."""
    return scripted_policy(
        *(message for message in dialogue.messages if message.role == "assistant")
    )
