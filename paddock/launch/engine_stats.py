"""Engine statistics of an RL run, as rows of engine.jsonl."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.engine import EngineStats

MIN_INTERVAL_S = 0.1  # between two rows
MAX_ROWS = 2000  # while the age of the run grows by a factor of e
Row = Callable[..., None]  # logs a row: name of the file, fields


class EngineStatLogger:
    """Writes engine.jsonl whenever statistics are read anyway (once a second, and at every batch).
    The interval grows with the age of the run, so that the file stays small."""

    def __init__(self, row: Row, clock: Callable[[], float] = time.monotonic) -> None:
        self._log_row, self._clock = row, clock
        self._started = clock()
        self._next = self._started

    def log_stats(self, every: "Sequence[EngineStats]") -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + max(MIN_INTERVAL_S, (now - self._started) / MAX_ROWS)
        self._log_row("engine", **_row(every))


GAUGES = (
    *("running", "waiting", "running_tokens", "waiting_tokens", "preemptions"),
    *("pages_total", "pages_used", "pages_cached", "pages_evictable"),
    *("prefix_cache_hit_tokens", "prefix_cache_query_tokens", "evicted_tokens"),
)
COUNTERS = (
    *("requests", "failed", "prompt_tokens", "prefill_tokens", "generated_tokens"),
    *("reasoning_tokens", "draft_tokens", "accepted_draft_tokens", "verify_steps"),
)


def _row(every: "Sequence[EngineStats]") -> dict[str, Any]:
    """Sums over all engines; the oldest version that one of them serves."""
    return {
        "version": min(stats.version for stats in every),
        "page_size": every[0].page_size,
        "draft_acceptance_per_position": _draft_acceptance(every),
        "busy_s": round(sum(stats.counters.busy_s for stats in every), 3),
        **{name: sum(getattr(stats, name) for stats in every) for name in GAUGES},
        **{name: sum(getattr(stats.counters, name) for stats in every) for name in COUNTERS},
    }


def _draft_acceptance(every: "Sequence[EngineStats]") -> list[tuple[int, int]]:
    """Proposed and accepted draft tokens at each position."""
    from paddock.engine import SpecDecodingStats

    found = SpecDecodingStats()
    for stats in every:
        found.merge(stats.counters.draft_stats)
    return found.per_position
