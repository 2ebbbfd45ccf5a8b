"""How fast an engine or a server answers: so many requests at once, each as soon as one ends."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from paddock.cli.errors import UserError
from paddock.cli.units import format_bytes
from paddock.launch.engines import pick_devices
from paddock.records import SamplingParams

if TYPE_CHECKING:
    from paddock.engine import Engine
    from paddock.model import ModelConfig, Transformer
    from paddock.rollout import InferenceClient

HEALTH_TIMEOUT_S = 10.0  # for a server to say that it is well
# Ids that every tokenizer has: what a server that we know nothing about can read.
COMMON_IDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked. Prompts are random and differ, so that nothing of them is cached but what
    they are said to share."""

    prompt: int  # tokens
    reply: int
    requests: int
    shared: int = 0  # tokens that every prompt begins with
    vocab: int = COMMON_IDS
    seed: int = 0

    def prompts(self, label: str) -> Iterator[tuple[int, ...]]:
        """Without end; other ones under another label."""
        same = Random(f"{self.seed}/shared")
        head = [same.randrange(self.vocab) for _ in range(self.shared)]
        chance = Random(f"{self.seed}/{label}")
        while True:
            own = (chance.randrange(self.vocab) for _ in range(self.prompt - self.shared))
            yield (*head, *own)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One answered request."""

    first_s: float  # from asking to the first token
    gaps_s: tuple[float, ...]  # before each token after it
    total_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPercentiles:
    """
    >>> LatencyPercentiles.of([0.004, 0.001, 0.003, 0.002])
    Spread(p50=2.0, p95=4.0, p99=4.0)
    """

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "LatencyPercentiles":
        """In milliseconds; each the least value that so large a share does not exceed."""
        ranked = sorted(seconds) or [0.0]
        at = {p: ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] * 1e3 for p in (50, 95, 99)}
        return cls(p50=at[50], p95=at[95], p99=at[99])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMetrics:
    """Of one run at one concurrency."""

    max_concurrency: int
    requests: int
    prompt_tokens: int
    reply_tokens: int
    seconds: float
    ttft_ms: LatencyPercentiles
    itl_ms: LatencyPercentiles
    e2e_latency_ms: LatencyPercentiles

    @property
    def output_throughput(self) -> float:
        return self.reply_tokens / self.seconds

    @property
    def total_token_throughput(self) -> float:
        return (self.prompt_tokens + self.reply_tokens) / self.seconds


async def run_workload(
    generate: "InferenceClient",
    load: Workload,
    at_once: int,
    clock: Callable[[], float] = time.perf_counter,
) -> ServingMetrics:
    """After a round of requests that does not count."""
    warm = load.prompts(f"warm {at_once}")
    await asyncio.gather(*(_timed(generate, next(warm), load, clock) for _ in range(at_once)))
    prompts = load.prompts(f"timed {at_once}")
    todo, found = iter(range(load.requests)), list[RequestTiming]()

    async def ask_on() -> None:
        for _ in todo:
            found.append(await _timed(generate, next(prompts), load, clock))

    start = clock()
    await asyncio.gather(*(ask_on() for _ in range(at_once)))
    return ServingMetrics(
        max_concurrency=at_once,
        requests=len(found),
        prompt_tokens=load.prompt * len(found),
        reply_tokens=sum(each.tokens for each in found),
        seconds=clock() - start,
        ttft_ms=LatencyPercentiles.of([each.first_s for each in found]),
        itl_ms=LatencyPercentiles.of([gap for each in found for gap in each.gaps_s]),
        e2e_latency_ms=LatencyPercentiles.of([each.total_s for each in found]),
    )


async def _timed(
    generate: "InferenceClient", prompt: tuple[int, ...], load: Workload, clock: Callable[[], float]
) -> RequestTiming:
    """Tokens that come together, drafts that were kept, share the time they took."""
    from paddock.rollout import EngineUnavailableError, InferenceRequest

    sampling = SamplingParams(max_new_tokens=load.reply, temperature=0.0, ignore_eos=True)
    ask = InferenceRequest(token_ids=prompt, sampling_params=sampling, session_id=f"{id(prompt)}")
    start = last = clock()
    first: float | None = None
    gaps: list[float] = []
    tokens = 0
    try:
        async with aclosing(generate.stream(ask)) as deltas:
            async for delta in deltas:
                now, new = clock(), len(delta.token_ids)
                if new and first is None:
                    first = now - start
                elif new:
                    gaps += [(now - last) / new] * new
                last, tokens = (now, tokens + new) if new else (last, tokens)
    except EngineUnavailableError as error:
        raise UserError(str(error)) from None
    generate.end_session(ask.session_id)
    if first is None:
        raise UserError("an answer came without a token")
    return RequestTiming(first, tuple(gaps), last - start, tokens)


# --- who answers ----------------------------------------------------------------------------------


@asynccontextmanager
async def connect_server(url: str, key: str | None) -> AsyncIterator["InferenceClient"]:
    """Ours, or any that speaks SGLang's dialect."""
    from paddock.rollout import sglang_client

    async with sglang_client.connection_pool() as http:
        there = sglang_client.ServerClient(url.rstrip("/").removesuffix("/v1"), http, key)
        if not await there.check_health(HEALTH_TIMEOUT_S):
            raise UserError(f"{url}: no server answers there within {HEALTH_TIMEOUT_S:g} s")
        yield sglang_client.SGLangClient(there)


@dataclass(frozen=True, slots=True)
class BenchmarkEngine:
    """An engine that is sized for a load, and what it serves."""

    generate: "InferenceClient"
    engine: "Engine"
    config: "ModelConfig"
    device: str
    dtype: str


def open_benchmark_engine(
    model: str, load: Workload, at_once: int, *, mtp: int, device: str | None, dtype: str | None
) -> BenchmarkEngine:
    """A checkpoint or a run by its folder, or a preset with fresh weights."""
    from paddock.engine import (
        ContextLengthExceededError,
        Engine,
        EngineError,
        EngineSettings,
        InvalidRequestError,
        Request,
    )
    from paddock.rollout import InProcessClient

    (place,) = pick_devices(device, 1)
    dtype = dtype or ("float32" if place == "cpu" else "bfloat16")
    network = _network(model, place, dtype)
    settings = EngineSettings(
        max_running_requests=at_once,
        num_speculative_tokens=mtp,
        stop_token_ids=(),
        context_length=load.prompt + load.reply,
    )
    rows = load.prompt + load.reply + 2 * mtp + 2 * settings.page_size
    pages = math.ceil(1.25 * at_once * rows / settings.page_size)
    engine = Engine(network, None, settings.model_copy(update={"num_pages": pages}))
    generate = InProcessClient(
        engine,
        Request,
        overlong_errors=(ContextLengthExceededError,),
        rejection_errors=(InvalidRequestError,),
        engine_errors=(EngineError,),
    )
    return BenchmarkEngine(generate, engine, network.config, place, dtype)


def _network(model: str, place: str, dtype: str) -> "Transformer":
    import torch

    from paddock.checkpoint import latest_model, load_pretrained
    from paddock.model import PRESETS, Transformer, cost
    from paddock.train import free_memory_bytes

    if Path(model).is_dir():
        return load_pretrained(latest_model(Path(model)), dtype, place)
    if model not in PRESETS:
        raise UserError(
            f"'{model}' is neither a folder nor a preset; presets: {', '.join(PRESETS)}"
        )
    config = PRESETS[model]
    needed, free = 4 * cost.count_parameters(config).total, free_memory_bytes(torch.device("cpu"))
    if needed > free:  # fresh weights are made in float32, in this machine's memory
        raise UserError(
            f"{model}: fresh weights take {format_bytes(needed)}, {format_bytes(free)} are free"
        )
    return Transformer.from_config(config, seed=0).cast(getattr(torch, dtype)).to(place).eval()
