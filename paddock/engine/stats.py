"""Engine statistics: counters, latency histograms and a snapshot (EngineStats)."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.engine.request import RequestOutput, Sequence

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
    """Counts of values at or below each bound; the last count is for larger values.

    >>> waits = Histogram((1.0, 2.0))
    >>> for seconds in (0.5, 1.0, 9.0):
    ...     waits.add(seconds)
    >>> waits.counts, waits.sum
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
    """Speculative decoding: (proposed, accepted) draft tokens by draft position.

    >>> drafts = SpecDecodingStats()
    >>> drafts.observe_draft(proposed=3, accepted=1)
    >>> drafts.observe_draft(proposed=2, accepted=2)
    >>> drafts.per_position
    [(2, 2), (2, 1), (1, 0)]
    """

    per_position: list[tuple[int, int]] = field(default_factory=list)

    def observe_draft(self, proposed: int, accepted: int) -> None:
        """Count one draft, of which the first `accepted` tokens were accepted."""
        self.merge(SpecDecodingStats([(1, int(i < accepted)) for i in range(proposed)]))

    def merge(self, other: "SpecDecodingStats") -> None:
        self.per_position += [(0, 0)] * (len(other.per_position) - len(self.per_position))
        for i, (proposed, accepted) in enumerate(other.per_position):
            total, total_accepted = self.per_position[i]
            self.per_position[i] = (total + proposed, total_accepted + accepted)

    def copy(self) -> "SpecDecodingStats":
        return SpecDecodingStats(list(self.per_position))


@dataclass(slots=True)
class CumulativeStats:
    """Counters that only grow; written by the engine thread."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # including tokens found in the prefix cache
    prefill_tokens: int = 0  # computed in prefill, including recomputation after preemption
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    draft_stats: SpecDecodingStats = field(default_factory=SpecDecodingStats)  # by position
    verify_steps: int = 0  # decode steps, summed over requests
    busy_s: float = 0.0  # time spent in steps
    queue_time_s: Histogram = field(default_factory=Histogram)
    ttft_s: Histogram = field(default_factory=Histogram)
    inter_token_latency_s: Histogram = field(default_factory=Histogram)
    e2e_latency_s: Histogram = field(default_factory=Histogram)

    def count_tokens(self, sequence: "Sequence", new: int, now: float) -> None:
        """Count new output tokens of a sequence, and how long they took."""
        self.generated_tokens += new
        self.verify_steps += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            self.ttft_s.add(now - sequence.arrived)
        elif sequence.last_token_at is not None:
            self.inter_token_latency_s.add((now - sequence.last_token_at) / new, new)
        sequence.last_token_at = now

    def count_finished(self, sequence: "Sequence", output: "RequestOutput") -> None:
        self.finished += output.completion.finish != "abort"
        self.aborted += output.completion.finish == "abort"
        self.reasoning_tokens += output.reasoning_tokens
        self.draft_tokens += sequence.draft_tokens
        self.accepted_draft_tokens += sequence.accepted_draft_tokens
        self.draft_stats.merge(sequence.draft_stats)
        self.queue_time_s.add(output.queue_time_s)
        self.e2e_latency_s.add(output.e2e_latency_s)

    def copy(self) -> "CumulativeStats":
        """A copy that shares no histogram with this one."""
        return replace(
            self,
            draft_stats=self.draft_stats.copy(),
            queue_time_s=self.queue_time_s.copy(),
            ttft_s=self.ttft_s.copy(),
            inter_token_latency_s=self.inter_token_latency_s.copy(),
            e2e_latency_s=self.e2e_latency_s.copy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Snapshot of an engine: cumulative counters and current gauges."""

    counters: CumulativeStats
    version: int
    running: int
    waiting: int
    paused: bool
    healthy: bool
    pages_total: int
    pages_used: int
    pages_cached: int  # in the prefix cache, shared or not
    pages_evictable: int  # in the prefix cache only
    page_size: int
    running_tokens: int  # of running requests, in the KV cache
    waiting_tokens: int  # of waiting requests, still to be prefilled
    prefix_cache_hit_tokens: int  # prompt tokens found in the prefix cache
    prefix_cache_query_tokens: int  # prompt tokens looked up there
    evicted_tokens: int
    preemptions: int
    kv_cache_bytes: int

    @property
    def accept_length(self) -> float:
        """Generated tokens per decode step of a request; 1 without speculative decoding."""
        return self.counters.generated_tokens / max(1, self.counters.verify_steps)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.prefix_cache_hit_tokens / max(1, self.prefix_cache_query_tokens)

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV cache pages held by running requests."""
        return (self.pages_used - self.pages_evictable) / self.pages_total
