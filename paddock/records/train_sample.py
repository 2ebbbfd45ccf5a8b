"""One trainable token sequence, as it travels from rollout to trainer."""

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """Tokens of one trajectory with what the rollout policy thought of them and what they earned.

    >>> s = TrainSample(id="s1/0", tokens=(7, 8, 9), logprobs=(0.0, -0.1, -0.4),
    ...            trained=(False, True, True), advantages=(0.0, 0.5, 0.5), oldest_version=3)
    >>> s.staleness(now=5)
    2
    """

    id: str  # the same for every copy, so that the ledger can count
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the rollout policy; read only where trained
    loss_mask: tuple[bool, ...]
    advantages: tuple[float, ...]  # read only where trained
    oldest_version: int  # of the weights that sampled any of these tokens

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("id: empty")
        for name in ("logprobs", "loss_mask", "advantages"):
            if len(getattr(self, name)) != len(self.token_ids):
                raise ValueError(
                    f"{name}: {len(getattr(self, name))} for {len(self.token_ids)} tokens"
                )
        for name in ("logprobs", "advantages"):
            if not all(map(isfinite, getattr(self, name))):
                raise ValueError(f"{name}: not all are finite")
        if min(self.token_ids, default=0) < 0:
            raise ValueError(f"tokens: {min(self.token_ids)} is negative")
        if not any(self.loss_mask):
            raise ValueError("trained: no token to learn from")
        if self.loss_mask[0]:
            raise ValueError("trained: the first token has nothing before it to be predicted from")
        if self.oldest_version < 0:
            raise ValueError(f"oldest_version: {self.oldest_version} is negative")

    def staleness(self, now: int) -> int:
        """How many weight versions ago the oldest token was sampled."""
        return now - self.oldest_version
