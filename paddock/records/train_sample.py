"""Training sample: one token sequence with log-probabilities, loss mask and advantages."""

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """Tokens of one trajectory with rollout log-probabilities, loss mask and advantages.

    >>> s = TrainSample(id="s1/0", token_ids=(7, 8, 9), logprobs=(0.0, -0.1, -0.4),
    ...                 loss_mask=(False, True, True), advantages=(0.0, 0.5, 0.5), oldest_version=3)
    >>> s.staleness(now=5)
    2
    """

    id: str  # the same for every copy of the sample
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the rollout policy; used only where loss_mask is set
    loss_mask: tuple[bool, ...]
    advantages: tuple[float, ...]  # used only where loss_mask is set
    oldest_version: int  # oldest weight version that sampled any of these tokens

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("id: must not be empty")
        for name in ("logprobs", "loss_mask", "advantages"):
            if len(getattr(self, name)) != len(self.token_ids):
                found, expected = len(getattr(self, name)), len(self.token_ids)
                raise ValueError(f"{name}: expected {expected} values, one per token, got {found}")
        for name in ("logprobs", "advantages"):
            if not all(map(isfinite, getattr(self, name))):
                raise ValueError(f"{name}: all values must be finite")
        if min(self.token_ids, default=0) < 0:
            raise ValueError(f"token_ids: must not be negative, got {min(self.token_ids)}")
        if not any(self.loss_mask):
            raise ValueError("loss_mask: at least one token must be trained")
        if self.loss_mask[0]:
            raise ValueError("loss_mask: the first token cannot be trained: nothing precedes it")
        if self.oldest_version < 0:
            raise ValueError(f"oldest_version: must not be negative, got {self.oldest_version}")

    def staleness(self, now: int) -> int:
        """How many weight versions ago the oldest token was sampled."""
        return now - self.oldest_version
