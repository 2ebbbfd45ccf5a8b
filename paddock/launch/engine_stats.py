"""How engines fare in an RL run, as rows of engine.jsonl."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.engine import EngineStats

LEAST_S = 0.1  # between two rows of an engine
ROWS = 2000  # of them at most while a run grows e times older
Row = Callable[..., None]  # a line of a file: its name, its fields


class EngineStatLogger:
    """Writes engine.jsonl: engines' numbers whenever somebody has looked at them anyway (once a
    second, and at every batch), ever more rarely as the run grows old: the file stays small."""

    def __init__(self, row: Row, clock: Callable[[], float] = time.monotonic) -> None:
        self._row, self._clock = row, clock
        self._began = clock()
        self._next = self._began

    def log_stats(self, every: "Sequence[EngineStats]") -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + max(LEAST_S, (now - self._began) / ROWS)
        self._row("engine", **_moment(every))


GAUGES = (
    *("running", "waiting", "running_tokens", "waiting_tokens", "preemptions"),
    *("pages_total", "pages_used", "pages_cached", "pages_evictable"),
    *("prefix_cache_hit_tokens", "prefix_cache_query_tokens", "evicted_tokens"),
)
COUNTERS = (
    *("requests", "failed", "prompt_tokens", "prefill_tokens", "generated_tokens"),
    *("reasoning_tokens", "draft_tokens", "accepted_draft_tokens", "verify_steps"),
)


def _moment(every: "Sequence[EngineStats]") -> dict[str, Any]:
    """Over all engines; the version that the slowest of them serves."""
    return {
        "version": min(stats.version for stats in every),
        "page_size": every[0].page_size,
        "draft_acceptance_per_position": _drafted(every),
        "busy_s": round(sum(stats.counters.busy_s for stats in every), 3),
        **{name: sum(getattr(stats, name) for stats in every) for name in GAUGES},
        **{name: sum(getattr(stats.counters, name) for stats in every) for name in COUNTERS},
    }


def _drafted(every: "Sequence[EngineStats]") -> list[tuple[int, int]]:
    """Drafts made and kept at each position."""
    from paddock.engine import SpecDecodingStats

    found = SpecDecodingStats()
    for stats in every:
        found.merge(stats.counters.draft_stats)
    return found.per_position
