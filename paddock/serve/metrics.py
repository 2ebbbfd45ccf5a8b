"""The engines' numbers for Prometheus, under the names that SGLang's boards know."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from paddock.engine import EngineStats, Histogram

Number = Callable[[EngineStats], float]

GAUGES: dict[str, tuple[str, Number]] = {
    "num_running_reqs": ("Requests being answered.", lambda s: s.running),
    "num_queue_reqs": ("Requests that wait.", lambda s: s.waiting),
    "num_used_tokens": ("Tokens of running requests in the cache.", lambda s: s.running_tokens),
    "token_usage": (
        "The share of the cache that running requests hold.",
        lambda s: s.kv_cache_usage,
    ),
    "cache_hit_rate": (
        "Of prompt tokens, how many were in the prefix cache.",
        lambda s: s.prefix_cache_hit_rate,
    ),
    "max_total_num_tokens": ("What the cache can hold.", lambda s: s.pages_total * s.page_size),
    "spec_accept_length": ("Tokens written for each sampling step.", lambda s: s.accept_length),
    "spec_accept_rate": (
        "Of drafted tokens, how many were kept.",
        lambda s: s.counters.accepted_draft_tokens / max(1, s.counters.draft_tokens),
    ),
    "num_retracted_reqs": ("Times a request had to wait again.", lambda s: s.preemptions),
    "num_paused_reqs": (
        "Requests held while generation is paused.",
        lambda s: s.running + s.waiting if s.paused else 0,
    ),
    "weight_version": ("The version of the weights that sample now.", lambda s: s.version),
    "num_grammar_queue_reqs": ("Requests that wait for a grammar.", lambda _: 0),
}
COUNTERS: dict[str, tuple[str, Number]] = {
    "prompt_tokens": ("Prompt tokens, cached or not.", lambda s: s.counters.prompt_tokens),
    "generation_tokens": ("Tokens written.", lambda s: s.counters.generated_tokens),
    "cached_tokens": (
        "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_cache_hit_tokens,
    ),
    "evicted_tokens": ("Tokens dropped from the prefix cache.", lambda s: s.evicted_tokens),
    "thinking_tokens": ("Tokens of reasoning.", lambda s: s.counters.reasoning_tokens),
    "num_requests": ("Requests taken.", lambda s: s.counters.requests),
    "num_aborted_requests": ("Requests ended before their time.", lambda s: s.counters.aborted),
    "num_failed_requests": ("Requests that the engine failed.", lambda s: s.counters.failed),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", lambda s: s.counters.ttft_s),
    "inter_token_latency_seconds": (
        "Between a token and the next.",
        lambda s: s.counters.inter_token_latency_s,
    ),
    "e2e_request_latency_seconds": ("Arrival to last token.", lambda s: s.counters.e2e_latency_s),
    "queue_time_seconds": ("Arrival to being let in.", lambda s: s.counters.queue_time_s),
}


class MetricsCollector:
    """Shows the engines' numbers. Rates are over the time between two looks."""

    def __init__(self, *, prefix: str, model: str, clock: Callable[[], float]) -> None:
        self.prefix, self.model, self.clock = prefix, model, clock
        self._before: dict[int, tuple[float, int]] = {}

    def render(self, every: Sequence[EngineStats], *, sessions: int) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Fixed(list(self._families(every, sessions))))
        return generate_latest(registry)

    def _families(self, every: Sequence[EngineStats], sessions: int) -> Iterator[Metric]:
        names = ["model_name", "dp_rank"]

        def filled(family: Any, number: Number) -> Any:
            for rank, stats in enumerate(every):
                family.add_metric([self.model, str(rank)], number(stats))
            return family

        for name, (about, number) in GAUGES.items():
            yield filled(GaugeMetricFamily(self.prefix + name, about, labels=names), number)
        for name, (about, number) in COUNTERS.items():
            yield filled(CounterMetricFamily(self.prefix + name, about, labels=names), number)
        for name, (about, histogram) in HISTOGRAMS.items():
            family = HistogramMetricFamily(self.prefix + name, about, labels=names)
            for rank, stats in enumerate(every):
                buckets, total = _cumulative(histogram(stats))
                family.add_metric([self.model, str(rank)], buckets, total)
            yield family
        kept = GaugeMetricFamily(
            self.prefix + "spec_accept_position",
            "Of drafts at this position, how many were kept.",
            labels=[*names, "position"],
        )
        for rank, stats in enumerate(every):
            for place, (made, right) in enumerate(stats.counters.draft_stats.per_position, start=1):
                kept.add_metric([self.model, str(rank), str(place)], right / max(1, made))
        yield kept
        speed = GaugeMetricFamily(
            self.prefix + "gen_throughput", "Tokens written a second.", labels=names
        )
        for rank, stats in enumerate(every):
            speed.add_metric([self.model, str(rank)], self._rate(rank, stats))
        yield speed
        active = GaugeMetricFamily(
            self.prefix + "routing_keys_active", "Sessions being served.", labels=names[:1]
        )
        active.add_metric([self.model], sessions)
        yield active

    def _rate(self, rank: int, stats: EngineStats) -> float:
        now, written = self.clock(), stats.counters.generated_tokens
        then, before = self._before.get(rank, (now, written))
        self._before[rank] = (now, written)
        return (written - before) / (now - then) if now > then else 0.0


class _Fixed:
    """A collector of what was collected before."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> list[Metric]:
        return self.families


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Prometheus counts what is at most each bound, up to +Inf."""
    found, total = [], 0
    bounds = [*map(str, histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found, histogram.sum
