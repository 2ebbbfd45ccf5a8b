"""What a world is asked to do, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from reprlib import repr as short
from typing import Literal, get_args

from paddock.records.message import Message

MAX_ABS_REWARD = 1e6  # either side of zero; advantages square rewards and sum them up

FailureKind = Literal["policy", "world", "grader", "infrastructure", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one attempt may use up before it is stopped."""

    turns: int  # generations of the model
    seconds: float  # wall clock, start of the world to verdict
    output_bytes: int  # of any single tool result; the rest is cut

    def __post_init__(self) -> None:
        for name in ("turns", "seconds", "output_bytes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)} is not a positive finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A problem as its solver may see it: the answer and the tests stay with the world, which finds
    them by `id`."""

    id: str
    env: str
    messages: tuple[Message, ...]
    budget: Budget

    def __post_init__(self) -> None:
        for name in ("id", "env", "messages"):
            if not getattr(self, name):
                raise ValueError(f"{name}: empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an attempt was worth, by a grader that worked. A reward lies in
    [-GREATEST_REWARD, GREATEST_REWARD]; anything else is refused here, where the verdict is made.

    >>> Verdict(reward=0.5, parts={"tests": 1.0, "style": 0.0}).parts["tests"]
    1.0
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)  # what the reward was made of
    note: str = ""

    def __post_init__(self) -> None:
        if not -MAX_ABS_REWARD <= self.reward <= MAX_ABS_REWARD:  # NaN is not either
            least, most = -MAX_ABS_REWARD, MAX_ABS_REWARD
            raise ValueError(f"reward: must be in [{least:g}, {most:g}], got {short(self.reward)}")
        for name, value in self.parts.items():
            if not isfinite(value):
                raise ValueError(f"parts: {name} is {value}, not finite")
        # Graders compare (True) and average (numpy's floats): neither reads back from a ledger.
        object.__setattr__(self, "reward", float(self.reward))
        parts = {name: float(value) for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt has no verdict.

    policy          it broke off by its own doing: unusable calls, no room left in the context
    world           the sandbox, a tool or a simulated user broke
    grader          it ended well enough but could not be judged
    infrastructure  an engine, the network or a machine was lost
    time            the clock ran out, and nobody knows through whose slowness

    >>> Failure(kind="world", where="sandbox.start", what="disk full").is_policy_failure
    False
    """

    kind: FailureKind
    where: str  # the step that failed
    what: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(FailureKind):
            raise ValueError(f"kind: {self.kind!r} is none of {', '.join(get_args(FailureKind))}")

    @property
    def is_policy_failure(self) -> bool:
        """Whether training may count this as a bad attempt. Any other failure says nothing about
        the policy: it gets no reward, not even zero, and stays out of its group's baseline."""
        return self.kind == "policy"


Outcome = Verdict | Failure
