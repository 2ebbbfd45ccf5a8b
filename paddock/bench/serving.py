"""Throughput and latency of an engine or a server at a fixed concurrency (closed loop)."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from paddock.launch import UserError, engines, units
from paddock.records import SamplingParams

if TYPE_CHECKING:
    from paddock.engine import Engine
    from paddock.model import ModelConfig, Transformer
    from paddock.rollout import InferenceClient

HEALTH_TIMEOUT_S = 10.0  # for a server to report that it is healthy
# Token ids that every tokenizer has, for a server whose vocabulary is unknown.
COMMON_IDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests. Prompts are random, so that only their shared prefix can be cached."""

    input_len: int  # tokens
    output_len: int
    num_prompts: int
    prefix_len: int = 0  # tokens that every prompt begins with
    vocab: int = COMMON_IDS
    seed: int = 0

    def prompts(self, label: str) -> Iterator[tuple[int, ...]]:
        """Endless; different ones for each label."""
        prefix_rng = Random(f"{self.seed}/shared")
        prefix = [prefix_rng.randrange(self.vocab) for _ in range(self.prefix_len)]
        rng = Random(f"{self.seed}/{label}")
        while True:
            own = (rng.randrange(self.vocab) for _ in range(self.input_len - self.prefix_len))
            yield (*prefix, *own)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One completed request."""

    first_s: float  # from sending to the first token
    gaps_s: tuple[float, ...]  # before each token after it
    total_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPercentiles:
    """
    >>> LatencyPercentiles.of([0.004, 0.001, 0.003, 0.002])
    LatencyPercentiles(p50=2.0, p95=4.0, p99=4.0)
    """

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "LatencyPercentiles":
        """In milliseconds, by nearest rank."""
        ranked = sorted(seconds) or [0.0]
        at = {p: ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] * 1e3 for p in (50, 95, 99)}
        return cls(p50=at[50], p95=at[95], p99=at[99])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMetrics:
    """Of one workload at one concurrency."""

    max_concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    ttft_ms: LatencyPercentiles
    itl_ms: LatencyPercentiles
    e2e_latency_ms: LatencyPercentiles

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_token_throughput(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


async def run_workload(
    client: "InferenceClient",
    load: Workload,
    max_concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> ServingMetrics:
    """Keep `max_concurrency` requests running until all are done, after one uncounted round."""
    warm = load.prompts(f"warm {max_concurrency}")
    await asyncio.gather(*(_timed(client, next(warm), load, clock) for _ in range(max_concurrency)))
    prompts = load.prompts(f"timed {max_concurrency}")
    todo, timings = iter(range(load.num_prompts)), list[RequestTiming]()

    async def worker() -> None:
        for _ in todo:
            timings.append(await _timed(client, next(prompts), load, clock))

    start = clock()
    await asyncio.gather(*(worker() for _ in range(max_concurrency)))
    return ServingMetrics(
        max_concurrency=max_concurrency,
        requests=len(timings),
        prompt_tokens=load.input_len * len(timings),
        output_tokens=sum(each.tokens for each in timings),
        seconds=clock() - start,
        ttft_ms=LatencyPercentiles.of([each.first_s for each in timings]),
        itl_ms=LatencyPercentiles.of([gap for each in timings for gap in each.gaps_s]),
        e2e_latency_ms=LatencyPercentiles.of([each.total_s for each in timings]),
    )


async def _timed(
    client: "InferenceClient", prompt: tuple[int, ...], load: Workload, clock: Callable[[], float]
) -> RequestTiming:
    """Tokens that arrive together (accepted drafts) share the time they took."""
    from paddock.rollout import EngineUnavailableError, InferenceRequest

    sampling = SamplingParams(max_new_tokens=load.output_len, temperature=0.0, ignore_eos=True)
    request = InferenceRequest(
        token_ids=prompt, sampling_params=sampling, session_id=f"{id(prompt)}"
    )
    start = last = clock()
    first: float | None = None
    gaps: list[float] = []
    tokens = 0
    try:
        async with aclosing(client.stream(request)) as deltas:
            async for delta in deltas:
                now, new = clock(), len(delta.token_ids)
                if new and first is None:
                    first = now - start
                elif new:
                    gaps += [(now - last) / new] * new
                last, tokens = (now, tokens + new) if new else (last, tokens)
    except EngineUnavailableError as error:
        raise UserError(str(error)) from None
    client.end_session(request.session_id)
    if first is None:
        raise UserError("a response contained no tokens")
    return RequestTiming(first, tuple(gaps), last - start, tokens)


# --- engines and servers --------------------------------------------------------------------------


@asynccontextmanager
async def connect_server(url: str, key: str | None) -> AsyncIterator["InferenceClient"]:
    """A client of our server, or of any with SGLang's /generate."""
    from paddock.rollout import sglang_client

    async with sglang_client.connection_pool() as http:
        server = sglang_client.ServerClient(url.rstrip("/").removesuffix("/v1"), http, key)
        if not await server.check_health(HEALTH_TIMEOUT_S):
            raise UserError(f"{url}: server unreachable (no answer within {HEALTH_TIMEOUT_S:g} s)")
        yield sglang_client.SGLangClient(server)


@dataclass(frozen=True, slots=True)
class BenchmarkEngine:
    """An engine sized for a workload, and what it serves."""

    client: "InferenceClient"
    engine: "Engine"
    config: "ModelConfig"
    device: str
    dtype: str


def open_benchmark_engine(
    model: str,
    load: Workload,
    max_concurrency: int,
    *,
    mtp: int,
    device: str | None,
    dtype: str | None,
) -> BenchmarkEngine:
    """An engine with a checkpoint, a run's newest one, or a preset with fresh weights."""
    from paddock.engine import (
        ContextLengthExceededError,
        Engine,
        EngineError,
        EngineSettings,
        InvalidRequestError,
        Request,
    )
    from paddock.rollout import InProcessClient

    (chosen,) = engines.pick_devices(device, 1)
    dtype = dtype or ("float32" if chosen == "cpu" else "bfloat16")
    network = _network(model, chosen, dtype)
    if chosen == "cpu":
        engines.pack_for_cpu(network, wait=True)
    settings = EngineSettings(
        max_running_requests=max_concurrency,
        num_speculative_tokens=mtp,
        stop_token_ids=(),
        context_length=load.input_len + load.output_len,
    )
    tokens = load.input_len + load.output_len + 2 * mtp + 2 * settings.page_size
    pages = math.ceil(1.25 * max_concurrency * tokens / settings.page_size)
    engine = Engine(network, None, settings.model_copy(update={"num_pages": pages}))
    client = InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )
    return BenchmarkEngine(client, engine, network.config, chosen, dtype)


def _network(model: str, device: str, dtype: str) -> "Transformer":
    import torch

    from paddock.checkpoint import latest_model, load_pretrained
    from paddock.model import PRESETS, Transformer, cost
    from paddock.train import free_memory_bytes

    if Path(model).is_dir():
        return load_pretrained(latest_model(Path(model)), dtype, device)
    if model not in PRESETS:
        raise UserError(
            f"'{model}' is neither a folder nor a preset; presets: {', '.join(PRESETS)}"
        )
    config = PRESETS[model]
    needed, free = 4 * cost.count_parameters(config).total, free_memory_bytes(torch.device("cpu"))
    if needed > free:  # fresh weights are initialised in float32, in host memory
        raise UserError(
            f"{model}: fresh weights need {units.format_bytes(needed)}, "
            f"{units.format_bytes(free)} are free"
        )
    return Transformer.from_config(config, seed=0).cast(getattr(torch, dtype)).to(device).eval()
