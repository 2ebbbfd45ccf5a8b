"""Prometheus metrics of the engines, under SGLang's metric names."""

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
    "num_running_reqs": ("Number of running requests.", lambda s: s.running),
    "num_queue_reqs": ("Number of requests in the waiting queue.", lambda s: s.waiting),
    "num_used_tokens": ("KV-cache tokens in use by running requests.", lambda s: s.running_tokens),
    "token_usage": (
        "KV-cache usage (0 to 1).",
        lambda s: s.kv_cache_usage,
    ),
    "cache_hit_rate": (
        "Prefix-cache hit rate.",
        lambda s: s.prefix_cache_hit_rate,
    ),
    "max_total_num_tokens": ("KV-cache capacity in tokens.", lambda s: s.pages_total * s.page_size),
    "spec_accept_length": (
        "Mean tokens generated per decode step (speculative acceptance length).",
        lambda s: s.accept_length,
    ),
    "spec_accept_rate": (
        "Acceptance rate of draft tokens.",
        lambda s: s.counters.accepted_draft_tokens / max(1, s.counters.draft_tokens),
    ),
    "num_retracted_reqs": ("Number of preempted requests.", lambda s: s.preemptions),
    "num_paused_reqs": (
        "Number of requests held while generation is paused.",
        lambda s: s.running + s.waiting if s.paused else 0,
    ),
    "weight_version": ("Weight version of the loaded model.", lambda s: s.version),
    "num_grammar_queue_reqs": ("Number of requests waiting for grammar compilation.", lambda _: 0),
}
COUNTERS: dict[str, tuple[str, Number]] = {
    "prompt_tokens": (
        "Prompt tokens processed, including cached ones.",
        lambda s: s.counters.prompt_tokens,
    ),
    "generation_tokens": ("Generated tokens.", lambda s: s.counters.generated_tokens),
    "cached_tokens": (
        "Prompt tokens served from the prefix cache.",
        lambda s: s.prefix_cache_hit_tokens,
    ),
    "evicted_tokens": ("Tokens evicted from the prefix cache.", lambda s: s.evicted_tokens),
    "thinking_tokens": ("Generated reasoning tokens.", lambda s: s.counters.reasoning_tokens),
    "num_requests": ("Requests accepted.", lambda s: s.counters.requests),
    "num_aborted_requests": ("Aborted requests.", lambda s: s.counters.aborted),
    "num_failed_requests": ("Failed requests.", lambda s: s.counters.failed),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "time_to_first_token_seconds": ("Time to first token.", lambda s: s.counters.ttft_s),
    "inter_token_latency_seconds": (
        "Inter-token latency.",
        lambda s: s.counters.inter_token_latency_s,
    ),
    "e2e_request_latency_seconds": (
        "End-to-end request latency.",
        lambda s: s.counters.e2e_latency_s,
    ),
    "queue_time_seconds": ("Time in the waiting queue.", lambda s: s.counters.queue_time_s),
}


class MetricsCollector:
    """Renders engine stats as Prometheus text. Rates cover the time between two scrapes."""

    def __init__(self, *, prefix: str, model: str, clock: Callable[[], float]) -> None:
        self.prefix, self.model, self.clock = prefix, model, clock
        self._previous: dict[int, tuple[float, int]] = {}

    def render(self, stats_per_rank: Sequence[EngineStats], *, sessions: int) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_FixedCollector(list(self._families(stats_per_rank, sessions))))
        return generate_latest(registry)

    def _families(self, stats_per_rank: Sequence[EngineStats], sessions: int) -> Iterator[Metric]:
        names = ["model_name", "dp_rank"]

        def add_samples(family: Any, value: Number) -> Any:
            for rank, stats in enumerate(stats_per_rank):
                family.add_metric([self.model, str(rank)], value(stats))
            return family

        for name, (description, value) in GAUGES.items():
            yield add_samples(
                GaugeMetricFamily(self.prefix + name, description, labels=names), value
            )
        for name, (description, value) in COUNTERS.items():
            yield add_samples(
                CounterMetricFamily(self.prefix + name, description, labels=names), value
            )
        for name, (description, histogram) in HISTOGRAMS.items():
            family = HistogramMetricFamily(self.prefix + name, description, labels=names)
            for rank, stats in enumerate(stats_per_rank):
                buckets, total = _cumulative_buckets(histogram(stats))
                family.add_metric([self.model, str(rank)], buckets, total)
            yield family
        accepted = GaugeMetricFamily(
            self.prefix + "spec_accept_position",
            "Acceptance rate of draft tokens at this position.",
            labels=[*names, "position"],
        )
        for rank, stats in enumerate(stats_per_rank):
            for position, (drafted, accepted_count) in enumerate(
                stats.counters.draft_stats.per_position, start=1
            ):
                accepted.add_metric(
                    [self.model, str(rank), str(position)], accepted_count / max(1, drafted)
                )
        yield accepted
        speed = GaugeMetricFamily(
            self.prefix + "gen_throughput", "Generation throughput in tokens/s.", labels=names
        )
        for rank, stats in enumerate(stats_per_rank):
            speed.add_metric([self.model, str(rank)], self._rate(rank, stats))
        yield speed
        active = GaugeMetricFamily(
            self.prefix + "routing_keys_active", "Active sessions (routing keys).", labels=names[:1]
        )
        active.add_metric([self.model], sessions)
        yield active

    def _rate(self, rank: int, stats: EngineStats) -> float:
        now, generated = self.clock(), stats.counters.generated_tokens
        previous_time, previous = self._previous.get(rank, (now, generated))
        self._previous[rank] = (now, generated)
        return (generated - previous) / (now - previous_time) if now > previous_time else 0.0


class _FixedCollector:
    """A collector that returns precomputed metric families."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def collect(self) -> list[Metric]:
        return self.families


def _cumulative_buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts up to each bound and +Inf, and the sum."""
    buckets, total = [], 0
    bounds = [*map(str, histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, histogram.sum
