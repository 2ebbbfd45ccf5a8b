"""Throughput and latency of an engine or a server, in the terms of `vllm bench serve`."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from random import Random
from typing import Any, Protocol

import numpy as np

from paddock.launch import UserError

# Token ids that every tokenizer has, for a server whose vocabulary is unknown.
COMMON_IDS = 200
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests. Prompts are random, so that only their shared prefix can be cached."""

    input_len: int  # tokens
    output_len: int
    num_prompts: int
    prefix_len: int = 0  # tokens that every prompt begins with
    vocab: int = COMMON_IDS
    seed: int = 0
    request_rate: float = math.inf  # requests/s
    burstiness: float = 1.0

    def prompts(self, label: str) -> Iterator[tuple[int, ...]]:
        """Endless; different ones for each label."""
        prefix_rng = Random(f"{self.seed}/shared")
        prefix = [prefix_rng.randrange(self.vocab) for _ in range(self.prefix_len)]
        rng = Random(f"{self.seed}/{label}")
        while True:
            own = (rng.randrange(self.vocab) for _ in range(self.input_len - self.prefix_len))
            yield (*prefix, *own)

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start to each request, endless; the first is at 0.

        Intervals are gamma distributed around 1 / `request_rate`: exponential (Poisson arrivals) at
        `burstiness` 1, more even above it.
        """
        rng, at = Random(f"{self.seed}/arrivals"), 0.0
        while True:
            yield at
            if math.isfinite(self.request_rate):
                scale = 1 / (self.request_rate * self.burstiness)
                at += rng.gammavariate(self.burstiness, scale)


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """One event of a response. The counts are totals so far, where the event reports them."""

    has_tokens: bool
    input_tokens: int | None = None
    output_tokens: int | None = None


class RequestFailedError(Exception):
    """A request without a complete response; the message says why."""


class BenchmarkBackend(Protocol):
    """Streams a greedy completion of exactly `output_len` tokens. Raises RequestFailedError."""

    def stream(
        self, prompt: tuple[int, ...], output_len: int
    ) -> AsyncGenerator[StreamedTokens, None]: ...


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One completed request."""

    ttft_s: float  # from sending to the first token
    itls_s: tuple[float, ...]  # between events with tokens
    e2el_s: float
    input_tokens: int
    output_tokens: int

    @property
    def tpot_s(self) -> float:
        """Time per token after the first."""
        return (self.e2el_s - self.ttft_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """In milliseconds; all zero without measurements.

    >>> LatencySummary.of([0.004, 0.001, 0.003, 0.002]).percentiles[50]
    2.5
    """

    mean: float
    median: float
    std: float
    percentiles: dict[int, float]  # linear between ranks

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "LatencySummary":
        ms = np.array(seconds or [0.0]) * 1e3
        spread = dict(zip(PERCENTILES, np.percentile(ms, PERCENTILES).tolist(), strict=True))
        return cls(float(ms.mean()), float(np.median(ms)), float(ms.std()), spread)

    def to_json(self, name: str) -> dict[str, float]:
        """With vLLM's keys, such as `p99_ttft_ms`."""
        values = {"mean": self.mean, "median": self.median, "std": self.std}
        values |= {f"p{p}": value for p, value in self.percentiles.items()}
        return {f"{key}_{name}_ms": value for key, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMetrics:
    """Of one workload at one concurrency."""

    workload: Workload
    max_concurrency: int | None
    duration: float  # seconds
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    ttft: LatencySummary
    tpot: LatencySummary
    itl: LatencySummary
    e2el: LatencySummary
    first_error: str | None = None
    peak_rss_bytes: int | None = None  # of the process that served

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    def to_json(self) -> dict[str, Any]:
        """With the keys of a result of `vllm bench serve`, and some of our own."""
        load = self.workload
        rate = load.request_rate
        return {
            "num_prompts": load.num_prompts,
            "request_rate": rate if math.isfinite(rate) else "inf",
            "burstiness": load.burstiness,
            "max_concurrency": self.max_concurrency,
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            **self.ttft.to_json("ttft"),
            **self.tpot.to_json("tpot"),
            **self.itl.to_json("itl"),
            **self.e2el.to_json("e2el"),
            "input_len": load.input_len,
            "output_len": load.output_len,
            "prefix_len": load.prefix_len,
            "seed": load.seed,
            "first_error": self.first_error,
            "peak_rss_bytes": self.peak_rss_bytes,
        }


@dataclass(frozen=True, slots=True)
class Timer:
    """What measures time, and waits."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def run_workload(
    backend: BenchmarkBackend,
    load: Workload,
    max_concurrency: int | None,
    timer: Timer | None = None,
) -> ServingMetrics:
    """Send all requests when they arrive, at most `max_concurrency` of them at a time (None: any
    number), after one uncounted round of that many (one). Raises UserError if all fail."""
    timer = timer or Timer()
    warm = replace(load, num_prompts=max_concurrency or 1, request_rate=math.inf)
    await _send_all(backend, warm, f"warm {max_concurrency}", max_concurrency, timer)
    start = timer.now()
    timings, errors = await _send_all(
        backend, load, f"timed {max_concurrency}", max_concurrency, timer
    )
    return ServingMetrics(
        workload=load,
        max_concurrency=max_concurrency,
        duration=timer.now() - start,
        completed=len(timings),
        failed=len(errors),
        total_input_tokens=sum(each.input_tokens for each in timings),
        total_output_tokens=sum(each.output_tokens for each in timings),
        ttft=LatencySummary.of([each.ttft_s for each in timings]),
        tpot=LatencySummary.of([each.tpot_s for each in timings if each.output_tokens > 1]),
        itl=LatencySummary.of([itl for each in timings for itl in each.itls_s]),
        e2el=LatencySummary.of([each.e2el_s for each in timings]),
        first_error=errors[0] if errors else None,
    )


async def _send_all(
    backend: BenchmarkBackend,
    load: Workload,
    label: str,
    max_concurrency: int | None,
    timer: Timer,
) -> tuple[list[RequestTiming], list[str]]:
    """Timings of the completed requests, errors of the others."""
    timings, errors = list[RequestTiming](), list[str]()
    free = asyncio.Semaphore(max_concurrency or load.num_prompts)

    async def send(prompt: tuple[int, ...]) -> None:
        async with free:
            try:
                timings.append(await _timed(backend, prompt, load.output_len, timer.now))
            except RequestFailedError as error:
                errors.append(str(error))

    start = timer.now()
    async with asyncio.TaskGroup() as group:
        requests = zip(load.arrivals(), load.prompts(label), strict=False)
        for due, prompt in islice(requests, load.num_prompts):
            wait = start + due - timer.now()
            if wait > 0:
                await timer.sleep(wait)
            group.create_task(send(prompt))
    if not timings:
        raise UserError(f"all {len(errors)} requests failed; the first: {errors[0]}")
    return timings, errors


async def _timed(
    backend: BenchmarkBackend, prompt: tuple[int, ...], output_len: int, now: Callable[[], float]
) -> RequestTiming:
    start, times = now(), list[float]()
    counted: StreamedTokens | None = None
    async with aclosing(backend.stream(prompt, output_len)) as events:
        async for event in events:
            if event.has_tokens:
                times.append(now())
            if event.output_tokens is not None:
                counted = event
    if counted is None:
        raise RequestFailedError("the response ended without token counts (usage)")
    inputs, outputs = counted.input_tokens or len(prompt), counted.output_tokens or 0
    if not times or not outputs:
        raise RequestFailedError("a response contained no tokens")
    # Some servers end with an event that has a finish reason but no token.
    itls = tuple(after - before for before, after in pairwise(times[:outputs]))
    return RequestTiming(times[0] - start, itls, times[-1] - start, inputs, outputs)
