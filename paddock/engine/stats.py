"""What an engine has done and is doing, in numbers."""

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


@dataclass(slots=True)
class Histogram:
    """How often a value fell at or below each bound; the last count is of what exceeded them all.

    >>> waits = Histogram((1.0, 2.0))
    >>> for seconds in (0.5, 1.0, 9.0):
    ...     waits.observe_draft(seconds)
    >>> waits.counts_by_reason, waits.sum
    ([2, 0, 1], 10.5)
    """

    bounds: tuple[float, ...] = LATENCY_BUCKETS_S
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, list(self.counts), self.sum)


@dataclass(slots=True)
class SpecDecodingStats:
    """How many drafts were made and kept at each position, the next token's first.

    >>> drafts = SpecDecodingStats()
    >>> drafts.observe_draft(made=3, kept=1)
    >>> drafts.observe_draft(made=2, kept=2)
    >>> drafts.per_position
    [(2, 2), (2, 1), (1, 0)]
    """

    per_position: list[tuple[int, int]] = field(default_factory=list)

    def observe_draft(self, made: int, kept: int) -> None:
        self.merge(SpecDecodingStats([(1, int(place < kept)) for place in range(made)]))

    def merge(self, other: "SpecDecodingStats") -> None:
        self.per_position += [(0, 0)] * (len(other.per_position) - len(self.per_position))
        for place, (made, kept) in enumerate(other.per_position):
            self.per_position[place] = (
                self.per_position[place][0] + made,
                self.per_position[place][1] + kept,
            )

    def copy(self) -> "SpecDecodingStats":
        return SpecDecodingStats(list(self.per_position))


@dataclass(slots=True)
class CumulativeStats:
    """What only grows. Kept by the engine's thread."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # of requests, found in the cache or not
    prefill_tokens: int = 0  # computed as prompts, those read again after a retraction too
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    draft_stats: SpecDecodingStats = field(
        default_factory=SpecDecodingStats
    )  # the same, by position
    verify_steps: int = 0  # sampling steps of requests, whatever they wrote
    busy_s: float = 0.0  # spent in steps
    queue_time_s: Histogram = field(default_factory=Histogram)
    ttft_s: Histogram = field(default_factory=Histogram)
    inter_token_latency_s: Histogram = field(default_factory=Histogram)
    e2e_latency_s: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A moment of an engine: counters so far, and how things stand."""

    counters: CumulativeStats
    version: int
    running: int
    waiting: int
    paused: bool
    healthy: bool
    pages_total: int
    pages_used: int
    pages_cached: int  # held by the prefix cache, shared or not
    pages_evictable: int  # held by the prefix cache alone
    page_size: int
    running_tokens: int  # of running requests, in the cache
    waiting_tokens: int  # of waiting requests, still to be read
    prefix_cache_hit_tokens: int  # prompt tokens found in the prefix cache
    prefix_cache_query_tokens: int  # prompt tokens looked for there
    evicted_tokens: int
    preemptions: int
    kv_cache_bytes: int

    @property
    def accept_length(self) -> float:
        """Tokens written for each sampling step of a request; 1 without drafts."""
        return self.counters.generated_tokens / max(1, self.counters.verify_steps)

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.prefix_cache_hit_tokens / max(1, self.prefix_cache_query_tokens)

    @property
    def kv_cache_usage(self) -> float:
        """The share of pages that running requests hold."""
        return (self.pages_used - self.pages_evictable) / self.pages_total
