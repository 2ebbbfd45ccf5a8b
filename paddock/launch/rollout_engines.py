"""Who samples for an RL run, and who teaches it: engines of its own, or servers elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.launch.engine_stats import EngineStatLogger, Row
from paddock.launch.engines import ModelFolder, load_engines, open_model_folder, pick_devices
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

MAX_RECORDED_SESSIONS = 16384  # whose experts are kept
WEIGHT_UPDATE_TIMEOUT_S = 10.0  # for a server that is alive to take new weights after all


@dataclass(frozen=True, kw_only=True)
class RolloutEngines:
    """What a run needs of whoever samples for it."""

    generate: "InferenceClient"
    publish_weights: "WeightPublisher"
    context_length: int | None  # tokens of a prompt and its reply; None: the servers say
    engine_busy_s: Callable[[], float] | None = (
        None  # worked so far, over all of them, divided by them
    )
    pressure: "Callable[[], Awaitable[EngineLoad]] | None" = None
    engines: "tuple[Engine | SubprocessEngine, ...]" = ()  # embedded


def discard_row(*_: Any, **__: Any) -> None:
    """Where nobody keeps rows."""


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
    settings: "RLSettings", model: ModelFolder, gauge: EngineStatLogger
) -> AsyncIterator[RolloutEngines]:
    from paddock.engine import ContextLengthExceededError, EngineError, InvalidRequestError, Request
    from paddock.rollout import EngineLoad, InProcessClient, Replica, ReplicaPool

    asked = settings.engines
    engines: Sequence[Engine | SubprocessEngine]
    if asked.place == "subprocess":
        engines = await asyncio.to_thread(_engines_apart, model, settings)
    else:
        engines = _engines(model, settings, replicas=asked.replicas)
    each = [
        InProcessClient(
            engine,
            Request,
            overlong_errors=(ContextLengthExceededError,),
            rejection_errors=(InvalidRequestError,),
            engine_errors=(EngineError,),
        )
        for engine in engines
    ]

    async def pressure() -> EngineLoad:
        # Not in threads, which an engine that stands still would hold one after the other.
        try:
            stats = [await asyncio.wrap_future(engine.stats_future()) for engine in engines]
        except EngineError as error:
            if asked.place != "subprocess":
                raise
            raise TimeoutError(str(error)) from error  # another process takes its place
        gauge.log_stats(stats)
        return EngineLoad(
            kv_cache_usage=max(s.kv_cache_usage for s in stats),
            waiting=max(s.waiting for s in stats),
            preemptions=sum(s.preemptions for s in stats),
        )

    def busy_s() -> float:
        stats = [engine.stats() for engine in engines]
        gauge.log_stats(stats)
        return sum(s.counters.busy_s for s in stats) / len(stats)

    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        generate: InferenceClient = each[0]
        if len(engines) > 1 or asked.place == "subprocess":  # which comes back when it has died
            replicas = [
                Replica(f"engine-{i}", one, partial(_alive, engine))
                for i, (one, engine) in enumerate(zip(each, engines, strict=True))
            ]
            generate = await stack.enter_async_context(ReplicaPool(replicas, _patience(asked)))
        yield RolloutEngines(
            generate=generate,
            publish_weights=_publisher(engines, asked),
            context_length=engines[0].capacity.context_length,
            engine_busy_s=busy_s,
            pressure=pressure,
            engines=tuple(engines),
        )


def _patience(asked: "RolloutEngineSettings") -> "ReplicaPoolSettings":
    from paddock.rollout import ReplicaPoolSettings

    return ReplicaPoolSettings(unreachable_timeout_s=asked.unreachable_timeout_s)


async def _alive(engine: "Engine | SubprocessEngine", _: float) -> bool:
    """A process that is gone is followed by another. When that has failed too often it counts as
    alive: whoever asks it next is told what happened, and the run ends."""
    from paddock.engine import Engine

    if isinstance(engine, Engine):
        return engine.healthy
    engine.restart_async()
    return engine.gave_up or await engine.check_health()


def _engines(model: ModelFolder, settings: "RLSettings", *, replicas: int) -> "list[Engine]":
    places = pick_devices(settings.compute.device, replicas)
    dtype = settings.engines.dtype or settings.compute.dtype
    return load_engines(model, places, dtype, _engine_settings(model, settings), fits=False)


def _engines_apart(model: ModelFolder, settings: "RLSettings") -> "list[SubprocessEngine]":
    from paddock.engine import SubprocessEngine

    dtype = settings.engines.dtype or settings.compute.dtype
    chosen, found = _engine_settings(model, settings), []
    for place in pick_devices(settings.compute.device, settings.engines.replicas):
        found.append(SubprocessEngine(partial(_engine_at, model.folder, place, dtype, chosen)))
    return found


def _engine_at(folder: Path, place: str, dtype: str, settings: "EngineSettings") -> "Engine":
    """In a process of its own."""
    (engine,) = load_engines(open_model_folder(folder, None), [place], dtype, settings, fits=False)
    return engine


def _engine_settings(model: ModelFolder, settings: "RLSettings") -> "EngineSettings":
    from paddock.engine import EngineSettings

    asked = settings.engines
    stops = tuple(dict.fromkeys((*model.config.eos, *model.renderer.stop_token_ids)))
    return EngineSettings(
        kv_cache_bytes=asked.kv_cache_bytes,
        context_length=asked.context_length,
        max_running_requests=asked.max_running_requests,
        num_speculative_tokens=asked.num_speculative_tokens,
        capture_routing=settings.routing_replay != "no",
        stop_token_ids=stops or None,
        seed=settings.seed % (1 << 30),
    )


def _publisher(
    engines: "Sequence[Engine | SubprocessEngine]", asked: "RolloutEngineSettings"
) -> "WeightPublisher":
    """Hands a version to every engine, and makes sure that they serve what was handed over."""
    from paddock.engine import EngineError
    from paddock.rollout import RunAbortedError

    pushes = [_push(engine, asked) for engine in engines]

    def publish(parcels: "Iterable[WeightUpdate]") -> None:
        found = list(parcels)
        for push in pushes:
            try:
                push(found)
            except EngineError as error:
                raise RunAbortedError(str(error)) from error

    return publish


def _push(engine: "Engine | SubprocessEngine", asked: "RolloutEngineSettings") -> "WeightPublisher":
    from paddock.engine import EngineWeightUpdater, SubprocessEngine

    if isinstance(engine, SubprocessEngine):
        return partial(
            engine.update_weights,
            mode=asked.on_weight_update,
            verify=asked.verify_weights,
            patience_s=asked.unreachable_timeout_s,
        )
    reload = EngineWeightUpdater(engine)

    def push(parcels: "Iterable[WeightUpdate]") -> None:
        found = list(parcels)
        reload.weight_publisher(asked.on_weight_update)(found)
        if asked.verify_weights:
            reload.verify(found)

    return push


@asynccontextmanager
async def paused(engine: "Engine | SubprocessEngine") -> AsyncIterator[None]:
    """Within, the engine begins nothing: what is asked meanwhile is begun together."""
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


async def _answering(server: "sglang_client.ServerClient", setting: str) -> None:
    """Nothing, if the server is there: better said now than after the first batch."""
    try:
        answers = await server.check_health(5.0)
    except ValueError:
        what = f"{server.url!r:.200} is no address, such as http://127.0.0.1:8000"
        raise UserError(f"'{setting}': {what}") from None
    if not answers:
        raise UserError(f"'{setting}': {server.url} does not answer")


@asynccontextmanager
async def _servers(
    asked: "RolloutEngineSettings", model: ModelFolder
) -> AsyncIterator[RolloutEngines]:
    """Servers that are there already, ours or any that speaks SGLang's dialect."""
    from paddock.checkpoint import CheckpointError, serialize_update
    from paddock.rollout import Replica, ReplicaPool, sglang_client

    context = asked.context_length or model.config.context
    loop = asyncio.get_running_loop()
    async with sglang_client.connection_pool() as http:
        servers = {
            url: sglang_client.ServerClient(url.rstrip("/"), http, asked.admin_key)
            for url in asked.urls
        }
        for server in servers.values():
            await _answering(server, "engines.urls")
        weights = sglang_client.HttpWeightPublisher(servers)
        replicas = [
            Replica(url, sglang_client.SGLangClient(server, context=context), server.check_health)
            for url, server in servers.items()
        ]

        async def hand_over(parcels: "list[WeightUpdate]") -> None:
            """To every server. One that dies meanwhile catches up when it comes back; one that
            lives and will not have the weights must not go on sampling with others."""
            version = parcels[0].version
            wrong = await weights.update_weights(
                [serialize_update(each) for each in parcels], version
            )
            deadline = loop.time() + WEIGHT_UPDATE_TIMEOUT_S
            while left := {url: why for url, why in wrong.items() if url in fleet.live_replicas}:
                if loop.time() > deadline:
                    url, why = next(iter(left.items()))
                    raise CheckpointError(f"{url} does not take version {version}: {why}")
                await asyncio.sleep(0.25)
                wrong = {
                    url: why for url, why in left.items() if not await weights.sync_replica(url)
                }

        def publish(parcels: "Iterable[WeightUpdate]") -> None:
            asyncio.run_coroutine_threadsafe(hand_over(list(parcels)), loop).result()

        async with ReplicaPool(replicas, _patience(asked), admit=weights.sync_replica) as fleet:
            weights.await_replica = fleet.while_alive
            yield RolloutEngines(generate=fleet, publish_weights=publish, context_length=context)


# --- teachers -------------------------------------------------------------------------------------


@asynccontextmanager
async def open_teachers(
    settings: "RLSettings", model: ModelFolder
) -> AsyncIterator[dict[str, "LogprobScorer"]]:
    """Whoever scores for the run, by name."""
    from paddock.rollout import sglang_client

    found: dict[str, LogprobScorer] = {}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(sglang_client.connection_pool())
        for name, teacher in settings.teachers.items():
            if teacher.url is not None:
                server = sglang_client.ServerClient(teacher.url.rstrip("/"), http)
                await _answering(server, f"teachers.{name}.url")
                found[name] = sglang_client.HttpLogprobScorer(server)
                continue
            assert teacher.checkpoint is not None
            theirs = open_model_folder(Path(teacher.checkpoint), settings.chat_template)
            if theirs.tokenizer.files["tokenizer.json"] != model.tokenizer.files["tokenizer.json"]:
                raise UserError(
                    f"'teachers.{name}': {teacher.checkpoint} and the student have different "
                    "tokenizers"
                )
            (engine,) = _engines(theirs, settings, replicas=1)
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
        answer = await self.engine.async_generate(request)
        return [score for score in answer.prompt_logprobs if score is not None]


# --- experts --------------------------------------------------------------------------------------


class RoutingRecorder:
    """Keeps what the engine routed, session by session, until the trainer asks for it."""

    def __init__(self, generate: "InferenceClient") -> None:
        self._generate = generate
        self._kept: dict[str, tuple[tuple[int, ...], NDArray[Any]]] = {}

    async def generate(self, ask: "InferenceRequest") -> "RequestOutput":
        answer = await self._generate.generate(replace(ask, return_routing=True))
        replay = getattr(answer, "routing", None)
        if replay is not None and replay.expert_TLK is not None:
            read = (*ask.token_ids, *answer.completion.token_ids)
            self._kept[ask.session_id] = (tuple(read), replay.expert_TLK)
            if (
                len(self._kept) > MAX_RECORDED_SESSIONS
            ):  # groups that were not trained leave theirs behind
                del self._kept[next(iter(self._kept))]
        return answer

    def stream(self, ask: "InferenceRequest") -> Any:
        return self._generate.stream(ask)

    def end_session(self, session: str) -> None:
        self._generate.end_session(session)

    def unavailable_reason(self) -> str:
        return self._generate.unavailable_reason()

    def add_routing(self, lessons: "Sequence[policy.PolicySample]") -> "list[policy.PolicySample]":
        """The lessons with the experts of their tokens, where the last reply of their session
        knows them; what was recorded by an earlier process, or rewritten since, goes without."""
        found = []
        for lesson in lessons:
            tokens = lesson.sample.token_ids
            read, expert_SLK = self._kept.get(lesson.sample.id.rpartition("/")[0], ((), None))
            if expert_SLK is not None and read == tokens:
                lesson = replace(lesson, routed_experts_SLK=expert_SLK)
            found.append(lesson)
        for lesson in lessons:
            self._kept.pop(lesson.sample.id.rpartition("/")[0], None)
        return found
