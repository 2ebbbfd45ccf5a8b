"""Adaptive concurrency: AIMD limit on running rollouts, driven by the KV cache usage."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine; of several, that of the most loaded."""

    kv_cache_usage: float  # 0 to 1, by running requests
    waiting: int = 0  # requests in the queue
    preemptions: int = 0  # total so far

    def __post_init__(self) -> None:
        if not 0 <= self.kv_cache_usage <= 1:
            raise ValueError(f"kv_cache_usage must be in [0, 1], got {self.kv_cache_usage}")


class AdaptiveConcurrencyLimit:
    """Additive increase, multiplicative decrease (AIMD).

    Increases by 1/16 of the maximum per update while the KV cache has room and the limit is
    reached. A decrease is followed by a cooldown: rollouts end slowly, and the load that caused it
    is still there at the next update.

    >>> limit = AdaptiveConcurrencyLimit(minimum=8, maximum=64)
    >>> limit.update(EngineLoad(kv_cache_usage=0.3), full=True)
    >>> limit.value
    12
    >>> limit.update(EngineLoad(kv_cache_usage=0.99, waiting=3), full=True)
    >>> limit.value
    9
    """

    high, low = 0.95, 0.85  # KV cache usage

    cooldown = 3  # updates

    def __init__(self, *, minimum: int, maximum: int) -> None:
        self._min, self._max, self._step = minimum, maximum, max(1, maximum // 16)
        self._preemptions: int | None = None
        self._cooldown = 0
        self.value = min(minimum, maximum)

    def update(self, load: EngineLoad, *, full: bool) -> None:
        """Adjust the limit to the engine load. `full`: as many rollouts run as the limit allows."""
        before = load.preemptions if self._preemptions is None else self._preemptions
        self._preemptions = load.preemptions
        self._cooldown = max(0, self._cooldown - 1)
        overloaded = load.kv_cache_usage > self.high and load.waiting > 0
        if overloaded or load.preemptions > before:
            if not self._cooldown:
                self.value = max(self._min, int(self.value * 0.75))
                self._cooldown = self.cooldown
        elif full and load.kv_cache_usage < self.low and not load.waiting:
            self.value = min(self._max, self.value + self._step)
