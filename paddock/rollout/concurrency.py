"""How many attempts run at once: more while the engine has room, fewer when it is crowded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How an engine fares; of several, the one that fares worst."""

    kv_cache_usage: float  # share of the cache that running requests hold
    waiting: int = 0  # requests that have no place in it
    preemptions: int = 0  # so far: requests that lost theirs and must be read again

    def __post_init__(self) -> None:
        if not 0 <= self.kv_cache_usage <= 1:
            raise ValueError(f"used: {self.kv_cache_usage} is not a share")


class AdaptiveConcurrencyLimit:
    """Additive growth, multiplicative retreat. Grows at each look by a sixteenth of the most, while
    the engine has room and the limit is what holds attempts back.

    A retreat is followed by a rest of some looks: attempts end slowly, and the crowd that caused it
    is still there at the next one.

    >>> limit = AdaptiveConcurrencyLimit(least=8, most=64)
    >>> limit.update(EngineLoad(used=0.3), full=True)
    >>> limit.value
    12
    >>> limit.update(EngineLoad(used=0.99, waiting=3), full=True)
    >>> limit.value
    9
    """

    crowded, roomy = 0.95, 0.85  # of the cache

    rest = 3  # looks

    def __init__(self, *, least: int, most: int) -> None:
        self._least, self._most, self._step = least, most, max(1, most // 16)
        self._retractions: int | None = None
        self._resting = 0
        self.value = min(least, most)

    def update(self, pressure: EngineLoad, *, full: bool) -> None:
        """Take the engine's state into account. `full`: as many attempts run as may."""
        before = pressure.preemptions if self._retractions is None else self._retractions
        self._retractions = pressure.preemptions
        self._resting = max(0, self._resting - 1)
        crowded = pressure.kv_cache_usage > self.crowded and pressure.waiting > 0
        if crowded or pressure.preemptions > before:
            if not self._resting:
                self.value = max(self._least, int(self.value * 0.75))
                self._resting = self.rest
        elif full and pressure.kv_cache_usage < self.roomy and not pressure.waiting:
            self.value = min(self._most, self.value + self._step)
