"""One attempt at a task, token by token, exactly as the engine saw and sampled it."""

from dataclasses import dataclass
from itertools import chain, pairwise
from math import isfinite
from typing import Literal, get_args

from paddock.records.task import Outcome

FinishReason = Literal["stop", "length", "abort"]

_ROUNDING = 1e-3  # how far above 0 an engine's arithmetic may push a log-probability


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens sampled in a row by one version of the weights."""

    version: int
    tokens: int

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"version: {self.version} is negative")
        if self.tokens < 1:
            raise ValueError(f"tokens: {self.tokens}, but a segment has at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine answered to one prompt.

    New weights may arrive while it is being sampled; `versions` says which wrote what:

    >>> answer = Completion(token_ids=(11, 12, 13), logprobs=(-0.1, 0.0, -0.5), finish="stop",
    ...                     versions=(Segment(3, 2), Segment(4, 1)), forced=(1,))
    >>> answer.token_versions
    (3, 3, 4)
    >>> answer.num_sampled_tokens
    (True, False, True)
    """

    token_ids: tuple[int, ...]  # with the stop token, if one was sampled
    logprobs: tuple[float, ...]  # under softmax(logits / temperature), before top-p, top-k, grammar
    versions: tuple[Segment, ...]  # in order, covering every token
    finish: FinishReason
    forced: tuple[int, ...] = ()  # positions that were put there, not sampled; ascending

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if min(self.token_ids, default=0) < 0:
            raise ValueError(f"token_ids: {min(self.token_ids)} is negative")
        if len(self.logprobs) != count:
            raise ValueError(f"logprobs: {len(self.logprobs)} for {count} tokens")
        if not all(map(isfinite, self.logprobs)) or max(self.logprobs, default=0.0) > _ROUNDING:
            raise ValueError("logprobs: not all are finite and at most 0")
        covered = sum(segment.tokens for segment in self.versions)
        if covered != count:
            raise ValueError(f"versions: cover {covered} of {count} tokens")
        if self.finish not in get_args(FinishReason):
            raise ValueError(
                f"finish: {self.finish!r} is none of {', '.join(get_args(FinishReason))}"
            )
        if any(a >= b for a, b in pairwise((-1, *self.forced, count))):
            raise ValueError(f"forced: {self.forced} are not ascending positions below {count}")

    @property
    def token_versions(self) -> tuple[int, ...]:
        """Of each token, the version that sampled it."""
        return tuple(chain.from_iterable((s.version,) * s.tokens for s in self.versions))

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Of each token, whether the policy chose it."""
        if not self.forced:
            return (True,) * len(self.token_ids)
        forced = frozenset(self.forced)
        return tuple(position not in forced for position in range(len(self.token_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one call of the engine added to the context."""

    added_ids: tuple[int, ...]  # of the prompt: only what follows the previous turn's last token
    completion: Completion
    trained: bool = True  # False where another branch of the session already trains this turn

    def __post_init__(self) -> None:
        if min(self.added_ids, default=0) < 0:
            raise ValueError(f"added_ids: {min(self.added_ids)} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A task, attempted. Each turn extends the one before, so the whole is stored once, and the
    columns below are what the engine had before it at the end. A harness that rewrites its past
    starts another branch of the same session.

    >>> from paddock.records import Verdict
    >>> answer = Completion(token_ids=(8, 9), logprobs=(-0.1, -0.4), finish="stop",
    ...                     versions=(Segment(3, 2),))
    >>> attempt = Trajectory(task_id="sum/17", group_id="g1", session_id="s1",
    ...                      turns=(Turn(added_ids=(1, 7), completion=answer),),
    ...                      outcome=Verdict(reward=1.0))
    >>> attempt.token_ids, attempt.logprobs
    ((1, 7, 8, 9), (0.0, 0.0, -0.1, -0.4))
    >>> attempt.loss_mask, attempt.oldest_version
    ((False, False, True, True), 3)
    """

    task_id: str
    group_id: str  # shared by the attempts that are compared with each other
    session_id: str
    branch: int = 0
    turns: tuple[Turn, ...]  # none if the world failed before the first
    outcome: Outcome

    def __post_init__(self) -> None:
        for name in ("task_id", "group_id", "session_id"):
            if not getattr(self, name):
                raise ValueError(f"{name}: empty")
        if self.branch < 0:
            raise ValueError(f"branch: {self.branch} is negative")
        if self.turns and not self.turns[0].added_ids:
            raise ValueError("turns: the first has no prompt")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token, read or sampled, in order."""
        return tuple(
            chain.from_iterable((*t.added_ids, *t.completion.token_ids) for t in self.turns)
        )

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of each token; 0.0 where it was read."""
        return tuple(
            chain.from_iterable(
                (0.0,) * len(t.added_ids) + t.completion.logprobs for t in self.turns
            )
        )

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """Of each token, whether the policy chose it here and is to learn from it."""
        flags: list[bool] = []
        for turn in self.turns:
            flags += [False] * len(turn.added_ids)
            sampled = turn.completion.sampled
            flags += sampled if turn.trained else [False] * len(sampled)
        return tuple(flags)

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that sampled any of these tokens; None if none was sampled."""
        return min((s.version for t in self.turns for s in t.completion.versions), default=None)
