"""Task, its budget, and the outcome of a rollout: Verdict or Failure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from reprlib import repr as short
from typing import ClassVar, Literal, get_args

from paddock.records.message import Message

MAX_ABS_REWARD = 1e6  # advantages sum squared rewards, which must not overflow

FailureKind = Literal["policy", "world", "grader", "infrastructure", "time"]
# Kinds that are stored under another name than they are displayed.
_DISPLAYED_KINDS = {"world": "environment", "time": "timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one rollout."""

    turns: int  # model generations
    seconds: float  # wall clock, from the start of the environment to the verdict
    output_bytes: int  # of one tool result; the rest is truncated

    def __post_init__(self) -> None:
        for name in ("turns", "seconds", "output_bytes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: must be positive and finite, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A problem as the policy sees it. The environment keeps the answer and the tests, by `id`."""

    id: str
    env: str
    messages: tuple[Message, ...]
    budget: Budget

    def __post_init__(self) -> None:
        for name in ("id", "env", "messages"):
            if not getattr(self, name):
                raise ValueError(f"{name}: must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reward of a rollout that was scored.

    Raises ValueError for a reward outside [-MAX_ABS_REWARD, MAX_ABS_REWARD] or a part that is not
    finite.

    >>> Verdict(reward=0.5, parts={"tests": 1.0, "style": 0.0}).parts["tests"]
    1.0
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)  # components of the reward
    note: str = ""
    MAX_ABS_REWARD: ClassVar[float] = MAX_ABS_REWARD

    def __post_init__(self) -> None:
        if not -MAX_ABS_REWARD <= self.reward <= MAX_ABS_REWARD:  # also rejects NaN
            low, high = -MAX_ABS_REWARD, MAX_ABS_REWARD
            raise ValueError(f"reward: must be in [{low:g}, {high:g}], got {short(self.reward)}")
        for name, value in self.parts.items():
            if not isfinite(value):
                raise ValueError(f"parts: {name} must be finite, got {value}")
        # Graders return bool and numpy floats too, which would not decode from the ledger.
        object.__setattr__(self, "reward", float(self.reward))
        parts = {name: float(value) for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rollout has no verdict.

    policy          the policy caused it: unusable tool calls, context length exceeded
    world           the environment failed: sandbox, tool or simulated user
    grader          the rollout ended but could not be scored
    infrastructure  an engine, the network or a machine was lost
    time            timeout; the cause is unknown

    The kinds are stored in the ledger and in exported trajectories; `label` is displayed.

    >>> Failure(kind="world", where="sandbox.start", what="disk full").label
    'environment at sandbox.start'
    """

    kind: FailureKind
    where: str  # the step that failed
    what: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(FailureKind):
            kinds = ", ".join(get_args(FailureKind))
            raise ValueError(f"kind: must be one of {kinds}, got {self.kind!r}")

    @property
    def is_policy_failure(self) -> bool:
        """Whether the policy is to blame. Any other failure has no reward, not even zero, and is
        excluded from its group's baseline."""
        return self.kind == "policy"

    @property
    def label(self) -> str:
        """Kind and step as they are displayed."""
        return f"{self.kind_label(self.kind)} at {self.where}"

    @staticmethod
    def kind_label(kind: str) -> str:
        """A kind of failure as it is displayed.

        >>> Failure.kind_label("time"), Failure.kind_label("policy")
        ('timeout', 'policy')
        """
        return _DISPLAYED_KINDS.get(kind, kind)


Outcome = Verdict | Failure
