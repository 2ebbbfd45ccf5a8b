"""Rollout engines and teachers of an RL run: embedded engines, or servers over HTTP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.launch.engine_stats import EngineStatLogger, Row
from paddock.launch.engines import (
    ModelFolder,
    in_process_client,
    load_engines,
    open_model_folder,
    pick_devices,
)
from paddock.launch.errors import UserError
from paddock.records import RequestOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paddock.checkpoint import WeightPublisher, WeightUpdate
    from paddock.engine import Engine, EngineSettings, SubprocessEngine
    from paddock.rl import LogprobScorer, RLSettings, RolloutEngineSettings
    from paddock.rollout import (
        EngineLoad,
        InferenceClient,
        InferenceRequest,
        ReplicaPoolSettings,
        sglang_client,
    )
    from paddock.train import policy

MAX_RECORDED_SESSIONS = 16384  # whose routed experts are kept
WEIGHT_UPDATE_TIMEOUT_S = 10.0  # for a live server to accept new weights


@dataclass(frozen=True, kw_only=True)
class RolloutEngines:
    """Inference client, weight publisher and statistics of the engines that sample for a run."""

    generate: "InferenceClient"
    publish_weights: "WeightPublisher"
    context_length: int | None  # tokens of prompt and completion; None: the servers check
    engine_busy_s: Callable[[], float] | None = None  # mean busy time of the engines so far
    pressure: "Callable[[], Awaitable[EngineLoad]] | None" = None
    engines: "tuple[Engine | SubprocessEngine, ...]" = ()  # embedded


def discard_row(*_: Any, **__: Any) -> None:
    """Row logger that keeps nothing."""


@asynccontextmanager
async def open_engines(
    settings: "RLSettings", model: ModelFolder, row: Row = discard_row
) -> AsyncIterator[RolloutEngines]:
    if settings.engines.urls:
        opened = _servers(settings.engines, model)
    else:
        opened = _embedded(settings, model, EngineStatLogger(row))
    async with opened as found:
        yield found


# --- embedded -------------------------------------------------------------------------------------


@asynccontextmanager
async def _embedded(
    settings: "RLSettings", model: ModelFolder, stat_logger: EngineStatLogger
) -> AsyncIterator[RolloutEngines]:
    from paddock.engine import EngineError
    from paddock.rollout import EngineLoad, Replica, ReplicaPool

    config = settings.engines
    engines: Sequence[Engine | SubprocessEngine]
    if config.place == "subprocess":
        engines = await asyncio.to_thread(_subprocess_engines, model, settings)
    else:
        engines = _engines(model, settings, replicas=config.replicas)
    clients = [in_process_client(engine) for engine in engines]

    async def pressure() -> EngineLoad:
        # Not in threads: every call would leave one blocked by an engine that hangs.
        try:
            stats = [await asyncio.wrap_future(engine.stats_future()) for engine in engines]
        except EngineError as error:
            if config.place != "subprocess":
                raise
            raise TimeoutError(str(error)) from error  # it is being restarted
        stat_logger.log_stats(stats)
        return EngineLoad(
            kv_cache_usage=max(s.kv_cache_usage for s in stats),
            waiting=max(s.waiting for s in stats),
            preemptions=sum(s.preemptions for s in stats),
        )

    def busy_s() -> float:
        stats = [engine.stats() for engine in engines]
        stat_logger.log_stats(stats)
        return sum(s.counters.busy_s for s in stats) / len(stats)

    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        generate: InferenceClient = clients[0]
        if len(engines) > 1 or config.place == "subprocess":  # restarted when it dies
            replicas = [
                Replica(f"engine-{i}", one, partial(_alive, engine))
                for i, (one, engine) in enumerate(zip(clients, engines, strict=True))
            ]
            pool = ReplicaPool(replicas, _limits(config))
            generate = await stack.enter_async_context(pool)
        yield RolloutEngines(
            generate=generate,
            publish_weights=_publisher(engines, config),
            context_length=engines[0].capacity.context_length,
            engine_busy_s=busy_s,
            pressure=pressure,
            engines=tuple(engines),
        )


def _limits(config: "RolloutEngineSettings") -> "ReplicaPoolSettings":
    from paddock.rollout import ReplicaPoolSettings

    return ReplicaPoolSettings(unreachable_timeout_s=config.unreachable_timeout_s)


async def _alive(engine: "Engine | SubprocessEngine", _: float) -> bool:
    """Health check that restarts a subprocess engine. After too many restarts it counts as alive:
    the next request raises its error, and the run ends."""
    from paddock.engine import Engine

    if isinstance(engine, Engine):
        return engine.healthy
    engine.restart_async()
    return engine.gave_up or await engine.check_health()


def _engines(model: ModelFolder, settings: "RLSettings", *, replicas: int) -> "list[Engine]":
    devices = pick_devices(settings.compute.device, replicas)
    dtype = settings.engines.dtype or settings.compute.dtype
    return load_engines(model, devices, dtype, _engine_settings(model, settings), fits=False)


def _subprocess_engines(model: ModelFolder, settings: "RLSettings") -> "list[SubprocessEngine]":
    from paddock.engine import SubprocessEngine

    dtype = settings.engines.dtype or settings.compute.dtype
    chosen, found = _engine_settings(model, settings), []
    for device in pick_devices(settings.compute.device, settings.engines.replicas):
        found.append(SubprocessEngine(partial(_load_engine, model.folder, device, dtype, chosen)))
    return found


def _load_engine(folder: Path, device: str, dtype: str, settings: "EngineSettings") -> "Engine":
    """The engine of a subprocess."""
    (engine,) = load_engines(open_model_folder(folder, None), [device], dtype, settings, fits=False)
    return engine


def _engine_settings(model: ModelFolder, settings: "RLSettings") -> "EngineSettings":
    from paddock.engine import EngineSettings

    config = settings.engines
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    return EngineSettings(
        kv_cache_bytes=config.kv_cache_bytes,
        context_length=config.context_length,
        max_running_requests=config.max_running_requests,
        num_speculative_tokens=config.num_speculative_tokens,
        capture_routing=settings.routing_replay != "no",
        stop_token_ids=stops or None,
        seed=settings.seed % (1 << 30),
    )


def _publisher(
    engines: "Sequence[Engine | SubprocessEngine]", config: "RolloutEngineSettings"
) -> "WeightPublisher":
    """Publishes a version to every engine and, if set, verifies that they serve it."""
    from paddock.engine import EngineError
    from paddock.rollout import RunAbortedError

    publishers = [_engine_publisher(engine, config) for engine in engines]

    def publish(updates: "Iterable[WeightUpdate]") -> None:
        received = list(updates)
        for publisher in publishers:
            try:
                publisher(received)
            except EngineError as error:
                raise RunAbortedError(str(error)) from error

    return publish


def _engine_publisher(
    engine: "Engine | SubprocessEngine", config: "RolloutEngineSettings"
) -> "WeightPublisher":
    from paddock.engine import EngineWeightUpdater, SubprocessEngine

    if isinstance(engine, SubprocessEngine):
        return partial(
            engine.update_weights,
            mode=config.on_weight_update,
            verify=config.verify_weights,
            timeout_s=config.unreachable_timeout_s,
        )
    reload = EngineWeightUpdater(engine)

    def push(updates: "Iterable[WeightUpdate]") -> None:
        found = list(updates)
        reload.weight_publisher(config.on_weight_update)(found)
        if config.verify_weights:
            reload.verify(found)

    return push


@asynccontextmanager
async def paused(engine: "Engine | SubprocessEngine") -> AsyncIterator[None]:
    """Within the block the engine starts no request; those submitted meanwhile start together."""
    from paddock.engine import EngineError
    from paddock.rollout import EngineUnavailableError

    try:
        await asyncio.to_thread(engine.pause, "in_place")
        try:
            yield
        finally:
            await asyncio.to_thread(engine.resume)
    except EngineError as error:
        raise EngineUnavailableError(str(error)) from error


# --- servers --------------------------------------------------------------------------------------


async def _check_server(server: "sglang_client.ServerClient", setting: str) -> None:
    """Raise UserError unless the server responds: before the first batch, not after it."""
    try:
        healthy = await server.check_health(5.0)
    except ValueError:
        what = f"{server.url!r:.200} is not a URL such as http://127.0.0.1:8000"
        raise UserError(f"'{setting}': {what}") from None
    if not healthy:
        raise UserError(f"'{setting}': {server.url} does not respond")


@asynccontextmanager
async def _servers(
    config: "RolloutEngineSettings", model: ModelFolder
) -> AsyncIterator[RolloutEngines]:
    """Running servers, ours or others with SGLang's API."""
    from paddock.checkpoint import CheckpointError, serialize_update
    from paddock.rollout import Replica, ReplicaPool, sglang_client

    context = config.context_length or model.config.context
    loop = asyncio.get_running_loop()
    async with sglang_client.connection_pool() as http:
        servers = {
            url: sglang_client.ServerClient(url.rstrip("/"), http, config.admin_key)
            for url in config.urls
        }
        for server in servers.values():
            await _check_server(server, "engines.urls")
        weights = sglang_client.HttpWeightPublisher(servers)
        replicas = [
            Replica(url, sglang_client.SGLangClient(server, context=context), server.check_health)
            for url, server in servers.items()
        ]

        async def update_all(updates: "list[WeightUpdate]") -> None:
            """Update every server. One that dies meanwhile is synced when it joins again; one that
            is alive and rejects the weights must not continue to sample with old ones."""
            version = updates[0].version
            errors = await weights.update_weights(
                [serialize_update(each) for each in updates], version
            )
            deadline = loop.time() + WEIGHT_UPDATE_TIMEOUT_S
            while left := {url: why for url, why in errors.items() if url in pool.live_replicas}:
                if loop.time() > deadline:
                    url, why = next(iter(left.items()))
                    raise CheckpointError(f"{url} rejects version {version}: {why}")
                await asyncio.sleep(0.25)
                errors = {
                    url: why for url, why in left.items() if not await weights.sync_replica(url)
                }

        def publish(updates: "Iterable[WeightUpdate]") -> None:
            asyncio.run_coroutine_threadsafe(update_all(list(updates)), loop).result()

        async with ReplicaPool(replicas, _limits(config), admit=weights.sync_replica) as pool:
            weights.await_replica = pool.while_alive
            yield RolloutEngines(generate=pool, publish_weights=publish, context_length=context)


# --- teachers -------------------------------------------------------------------------------------


@asynccontextmanager
async def open_teachers(
    settings: "RLSettings", model: ModelFolder
) -> AsyncIterator[dict[str, "LogprobScorer"]]:
    """The teachers of the run, by name."""
    from paddock.rollout import sglang_client

    found: dict[str, LogprobScorer] = {}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(sglang_client.connection_pool())
        for name, teacher in settings.teachers.items():
            if teacher.url is not None:
                server = sglang_client.ServerClient(teacher.url.rstrip("/"), http)
                await _check_server(server, f"teachers.{name}.url")
                found[name] = sglang_client.HttpLogprobScorer(server)
                continue
            assert teacher.checkpoint is not None
            other = open_model_folder(Path(teacher.checkpoint), settings.chat_template)
            if other.tokenizer.files["tokenizer.json"] != model.tokenizer.files["tokenizer.json"]:
                raise UserError(
                    f"'teachers.{name}': {teacher.checkpoint} and the student have different "
                    "tokenizers"
                )
            (engine,) = _engines(other, settings, replicas=1)
            stack.callback(engine.close)
            found[name] = EngineTeacher(engine)
        yield found


@dataclass(frozen=True)
class EngineTeacher:
    """A teacher in this process."""

    engine: "Engine"

    async def __call__(self, token_ids: Sequence[int], start: int) -> Sequence[float]:
        from paddock.engine import Request
        from paddock.records import SamplingParams

        request = Request(
            token_ids=tuple(token_ids),
            sampling_params=SamplingParams(max_new_tokens=1, temperature=0.0),
            prompt_logprobs_start=start,
        )
        output = await self.engine.async_generate(request)
        return [score for score in output.prompt_logprobs if score is not None]


# --- experts --------------------------------------------------------------------------------------


class RoutingRecorder:
    """Records the routed experts of each session until the trainer replays them."""

    def __init__(self, generate: "InferenceClient") -> None:
        self._generate = generate
        self._kept: dict[str, tuple[tuple[int, ...], NDArray[Any]]] = {}

    async def generate(self, request: "InferenceRequest") -> "RequestOutput":
        output = await self._generate.generate(replace(request, return_routing=True))
        replay = getattr(output, "routing", None)
        if replay is not None and replay.expert_TLK is not None:
            seen = (*request.token_ids, *output.completion.token_ids)
            self._kept[request.session_id] = (tuple(seen), replay.expert_TLK)
            # Entries of groups that were not trained remain.
            if len(self._kept) > MAX_RECORDED_SESSIONS:
                del self._kept[next(iter(self._kept))]
        return output

    def stream(self, request: "InferenceRequest") -> Any:
        return self._generate.stream(request)

    def end_session(self, session: str) -> None:
        self._generate.end_session(session)

    def unavailable_reason(self) -> str:
        return self._generate.unavailable_reason()

    def add_routing(self, samples: "Sequence[policy.PolicySample]") -> "list[policy.PolicySample]":
        """The samples with the routed experts of their tokens, if recorded with the last reply of
        their session; not if an earlier process sampled it or the tokens have changed."""
        found = []
        for each in samples:
            tokens = each.sample.token_ids
            seen, expert_SLK = self._kept.get(each.sample.id.rpartition("/")[0], ((), None))
            if expert_SLK is not None and seen == tokens:
                each = replace(each, routed_experts_SLK=expert_SLK)
            found.append(each)
        for each in samples:
            self._kept.pop(each.sample.id.rpartition("/")[0], None)
        return found
