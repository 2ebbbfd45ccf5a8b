"""What an engine has done and is doing, in numbers."""

from bisect import bisect_left
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """How often a value fell at or below each bound; the last count is of what exceeded them all.

    >>> waits = Histogram((1.0, 2.0))
    >>> for seconds in (0.5, 1.0, 9.0):
    ...     waits.add(seconds)
    >>> waits.counts, waits.sum
    ([2, 0, 1], 10.5)
    """

    bounds: tuple[float, ...] = SECONDS
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
class Drafts:
    """How many drafts were made and kept at each position, the next token's first.

    >>> drafts = Drafts()
    >>> drafts.add(made=3, kept=1)
    >>> drafts.add(made=2, kept=2)
    >>> drafts.at
    [(2, 2), (2, 1), (1, 0)]
    """

    at: list[tuple[int, int]] = field(default_factory=list)

    def add(self, made: int, kept: int) -> None:
        self.join(Drafts([(1, int(place < kept)) for place in range(made)]))

    def join(self, other: "Drafts") -> None:
        self.at += [(0, 0)] * (len(other.at) - len(self.at))
        for place, (made, kept) in enumerate(other.at):
            self.at[place] = (self.at[place][0] + made, self.at[place][1] + kept)

    def copy(self) -> "Drafts":
        return Drafts(list(self.at))


@dataclass(slots=True)
class Counters:
    """What only grows. Kept by the engine's thread."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # of requests, found in the cache or not
    read_tokens: int = 0  # computed as prompts, those read again after a retraction too
    generated_tokens: int = 0
    thinking_tokens: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    drafted: Drafts = field(default_factory=Drafts)  # the same, by position
    verify_steps: int = 0  # sampling steps of requests, whatever they wrote
    busy_s: float = 0.0  # spent in steps
    queued_s: Histogram = field(default_factory=Histogram)
    first_token_s: Histogram = field(default_factory=Histogram)
    between_tokens_s: Histogram = field(default_factory=Histogram)
    total_s: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A moment of an engine: counters so far, and how things stand."""

    counters: Counters
    version: int
    running: int
    waiting: int
    paused: bool
    healthy: bool
    pages_total: int
    pages_used: int
    pages_cached: int  # held by the prefix cache, shared or not
    pages_spare: int  # held by the prefix cache alone
    page_tokens: int
    running_tokens: int  # of running requests, in the cache
    waiting_tokens: int  # of waiting requests, still to be read
    hit_tokens: int  # prompt tokens found in the prefix cache
    asked_tokens: int  # prompt tokens looked for there
    evicted_tokens: int
    retractions: int
    cache_bytes: int

    @property
    def accept_length(self) -> float:
        """Tokens written for each sampling step of a request; 1 without drafts."""
        return self.counters.generated_tokens / max(1, self.counters.verify_steps)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.asked_tokens)

    @property
    def page_usage(self) -> float:
        """The share of pages that running requests hold."""
        return (self.pages_used - self.pages_spare) / self.pages_total
