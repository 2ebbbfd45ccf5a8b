"""Trajectory: the tokens of one rollout exactly as the engine read and sampled them."""

from dataclasses import dataclass
from itertools import chain, pairwise
from math import isfinite
from typing import Literal, get_args

from paddock.records.task import Outcome

FinishReason = Literal["stop", "length", "abort"]

_ROUNDING = 1e-3  # tolerance above 0: rounding in the engine may make a log-probability positive


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens sampled by one weight version."""

    version: int
    tokens: int

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"version: must not be negative, got {self.version}")
        if self.tokens < 1:
            raise ValueError(f"tokens: must be at least 1, got {self.tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The output of the engine for one prompt.

    A weight update may happen while it is sampled; `versions` records which version sampled what:

    >>> completion = Completion(token_ids=(11, 12, 13), logprobs=(-0.1, 0.0, -0.5), finish="stop",
    ...                         versions=(Segment(3, 2), Segment(4, 1)), forced=(1,))
    >>> completion.token_versions
    (3, 3, 4)
    >>> completion.sampled
    (True, False, True)
    """

    token_ids: tuple[int, ...]  # including the stop token, if one was sampled
    logprobs: tuple[float, ...]  # of softmax(logits / temperature), before top-p, top-k, grammar
    versions: tuple[Segment, ...]  # in order, covering every token
    finish: FinishReason
    forced: tuple[int, ...] = ()  # positions of forced (not sampled) tokens, ascending

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if min(self.token_ids, default=0) < 0:
            raise ValueError(f"token_ids: must not be negative, got {min(self.token_ids)}")
        if len(self.logprobs) != count:
            raise ValueError(
                f"logprobs: expected {count} values, one per token, got {len(self.logprobs)}"
            )
        if not all(map(isfinite, self.logprobs)) or max(self.logprobs, default=0.0) > _ROUNDING:
            raise ValueError("logprobs: all values must be finite and at most 0")
        covered = sum(segment.tokens for segment in self.versions)
        if covered != count:
            raise ValueError(f"versions: must cover {count} tokens, got {covered}")
        if self.finish not in get_args(FinishReason):
            reasons = ", ".join(get_args(FinishReason))
            raise ValueError(f"finish: must be one of {reasons}, got {self.finish!r}")
        if any(a >= b for a, b in pairwise((-1, *self.forced, count))):
            raise ValueError(
                f"forced: must be ascending positions below {count}, got {self.forced}"
            )

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The weight version that sampled each token."""
        return tuple(chain.from_iterable((s.version,) * s.tokens for s in self.versions))

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each token, whether it was sampled (not forced)."""
        if not self.forced:
            return (True,) * len(self.token_ids)
        forced = frozenset(self.forced)
        return tuple(position not in forced for position in range(len(self.token_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The tokens that one generation added to the context: prompt tokens, then the completion."""

    added_ids: tuple[int, ...]  # prompt tokens after the last token of the previous turn
    completion: Completion
    trained: bool = True  # False if another branch of the session trains this turn

    def __post_init__(self) -> None:
        if min(self.added_ids, default=0) < 0:
            raise ValueError(f"added_ids: must not be negative, got {min(self.added_ids)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One branch of a rollout. Each turn extends the previous one, so every token is stored once
    and the properties below are the engine's context at the end. A harness that rewrites its
    history starts another branch of the same session.

    >>> from paddock.records import Verdict
    >>> completion = Completion(token_ids=(8, 9), logprobs=(-0.1, -0.4), finish="stop",
    ...                         versions=(Segment(3, 2),))
    >>> branch = Trajectory(task_id="sum/17", group_id="g1", session_id="s1",
    ...                     turns=(Turn(added_ids=(1, 7), completion=completion),),
    ...                     outcome=Verdict(reward=1.0))
    >>> branch.token_ids, branch.logprobs
    ((1, 7, 8, 9), (0.0, 0.0, -0.1, -0.4))
    >>> branch.loss_mask, branch.oldest_version
    ((False, False, True, True), 3)
    """

    task_id: str
    group_id: str  # shared by the rollouts that have one baseline
    session_id: str
    branch: int = 0
    turns: tuple[Turn, ...]  # empty if the environment failed before the first
    outcome: Outcome

    def __post_init__(self) -> None:
        for name in ("task_id", "group_id", "session_id"):
            if not getattr(self, name):
                raise ValueError(f"{name}: must not be empty")
        if self.branch < 0:
            raise ValueError(f"branch: must not be negative, got {self.branch}")
        if self.turns and not self.turns[0].added_ids:
            raise ValueError("turns: the first turn must have prompt tokens")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens, prompt and sampled, in order."""
        return tuple(
            chain.from_iterable((*t.added_ids, *t.completion.token_ids) for t in self.turns)
        )

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probability of each token; 0.0 for prompt tokens."""
        return tuple(
            chain.from_iterable(
                (0.0,) * len(t.added_ids) + t.completion.logprobs for t in self.turns
            )
        )

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """For each token, whether it was sampled here and is trained on."""
        flags: list[bool] = []
        for turn in self.turns:
            flags += [False] * len(turn.added_ids)
            sampled = turn.completion.sampled
            flags += sampled if turn.trained else [False] * len(sampled)
        return tuple(flags)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that sampled any of these tokens; None if none was sampled."""
        return min((s.version for t in self.turns for s in t.completion.versions), default=None)
