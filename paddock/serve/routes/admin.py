"""SGLang's admin routes: cache flush, abort, pause and weight updates."""

import asyncio
from base64 import b64decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, TypeVar, get_args

from starlette.requests import Request
from starlette.responses import Response

from paddock.api import RequestBody, parse_body
from paddock.engine import Engine, PauseMode
from paddock.http import JsonRouter, json_response
from paddock.records import ApiError
from paddock.serve.chat_service import ChatService
from paddock.serve.weight_updater import TensorSpec, WeightUpdateGroup, WeightUpdater

_T = TypeVar("_T")
POLL_S = 0.05


class AbortRequestBody(RequestBody):
    rid: str | None = None
    abort_all: bool | None = None


class PauseGenerationBody(RequestBody):
    mode: str | None = None


class UpdateWeightsFromDiskBody(RequestBody):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class UpdateWeightsFromTensorBody(RequestBody):
    """Safetensors files in base64; pickle is not accepted."""

    serialized_named_tensors: list[str]
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class InitWeightsUpdateGroupBody(RequestBody):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class UpdateWeightsFromDistributedBody(RequestBody):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class DestroyWeightsUpdateGroupBody(RequestBody):
    group_name: str = "weight_update_group"


class UpdateWeightVersionBody(RequestBody):
    new_version: str
    abort_all_requests: bool | None = None


class GetWeightsByNameBody(RequestBody):
    name: str
    truncate_size: int = 100


class CheckWeightsBody(RequestBody):
    action: str | None = None


ADMIN_PATHS = (
    "/flush_cache", "/abort_request", "/pause_generation", "/continue_generation",
    "/update_weights_from_disk", "/update_weights_from_tensor", "/init_weights_update_group",
    "/update_weights_from_distributed", "/destroy_weights_update_group", "/update_weight_version",
    "/get_weights_by_name", "/weights_checker",
)  # fmt: skip


class AdminRoutes:
    def __init__(self, service: ChatService, weights: Sequence[WeightUpdater] = ()) -> None:
        """`weights` are the weight updaters, one per engine; without them updates are rejected."""
        self.service, self.weights = service, tuple(weights)
        self._update_lock = asyncio.Lock()  # one weight update at a time

    def register(self, router: JsonRouter) -> None:
        both = ("GET", "POST")
        router.add_route("/flush_cache", self.flush_cache, methods=both)
        router.add_route("/abort_request", self.abort_request, body=AbortRequestBody)
        router.add_route("/pause_generation", self.pause_generation, body=PauseGenerationBody)
        router.add_route("/continue_generation", self.continue_generation)
        router.add_route(
            "/update_weights_from_disk",
            self.update_weights_from_disk,
            body=UpdateWeightsFromDiskBody,
        )
        router.add_route(
            "/update_weights_from_tensor",
            self.update_weights_from_tensor,
            body=UpdateWeightsFromTensorBody,
            max_body_bytes=self.service.settings.max_weights_body_bytes,
        )
        router.add_route(
            "/init_weights_update_group",
            self.init_weights_update_group,
            body=InitWeightsUpdateGroupBody,
        )
        router.add_route(
            "/update_weights_from_distributed",
            self.update_weights_from_distributed,
            body=UpdateWeightsFromDistributedBody,
        )
        router.add_route(
            "/destroy_weights_update_group",
            self.destroy_weights_update_group,
            body=DestroyWeightsUpdateGroupBody,
        )
        router.add_route(
            "/update_weight_version", self.update_weight_version, body=UpdateWeightVersionBody
        )
        router.add_route(
            "/get_weights_by_name", self.get_weights_by_name, body=GetWeightsByNameBody
        )
        router.add_route("/weights_checker", self.check_weights, body=CheckWeightsBody)

    # --- requests ---------------------------------------------------------------------------------

    async def flush_cache(self, http: Request, _value: Any) -> Response:
        timeout = http.query_params.get("timeout", "0")
        try:
            remaining_s = float(timeout)
        except ValueError:
            raise ApiError(
                f"timeout must be a number of seconds, got {timeout!r:.80}", param="timeout"
            ) from None
        while True:
            if all(await self._on_every_engine(Engine.flush_cache)):
                return json_response({"success": True, "message": "cache flushed"})
            if not remaining_s > 0:
                message = "cache not flushed: requests are running or waiting"
                return json_response({"success": False, "message": message}, status=400)
            await asyncio.sleep(POLL_S)
            remaining_s -= POLL_S

    async def abort_request(self, _http: Request, value: Any) -> Any:
        body = parse_body(AbortRequestBody, value)
        if body.abort_all:
            return {"success": True, "aborted": sum(await self._on_every_engine(Engine.abort_all))}
        if not body.rid:
            raise ApiError("either 'rid' or 'abort_all' is required", param="rid")
        return {"success": True, "aborted": self.service.abort(body.rid)}

    async def pause_generation(self, _http: Request, value: Any) -> Any:
        mode: Any = parse_body(PauseGenerationBody, value).mode or "abort"
        if mode not in get_args(PauseMode):
            known = ", ".join(get_args(PauseMode))
            raise ApiError(f"mode must be one of {known}, got {mode!r:.80}", param="mode")
        await self._on_every_engine(lambda engine: engine.pause(mode))
        return {"status": "ok", "message": f"paused ({mode})"}

    async def continue_generation(self, _http: Request, _value: Any) -> Any:
        await self._on_every_engine(Engine.resume)
        return {"status": "ok", "message": "generation continued"}

    # --- weights ----------------------------------------------------------------------------------

    async def update_weights_from_disk(self, _http: Request, value: Any) -> Any:
        body = parse_body(UpdateWeightsFromDiskBody, value)
        version, mode = self._version(body.weight_version), _mode(body.abort_all_requests)
        return await self._update(
            lambda weights, _: weights.update_from_disk(body.model_path, version=version, mode=mode)
        )

    async def update_weights_from_tensor(self, _http: Request, value: Any) -> Any:
        body = parse_body(UpdateWeightsFromTensorBody, value)
        version, mode = self._version(body.weight_version), _mode(body.abort_all_requests)
        try:
            files = [b64decode(text, validate=True) for text in body.serialized_named_tensors]
        except ValueError as error:
            raise ApiError(f"serialized_named_tensors must be base64: {error}") from None
        return await self._update(
            lambda weights, _: weights.update_from_tensor(files, version=version, mode=mode)
        )

    async def init_weights_update_group(self, _http: Request, value: Any) -> Any:
        body = parse_body(InitWeightsUpdateGroupBody, value)

        def init(weights: WeightUpdater, replica: int) -> int:
            weights.init_group(
                WeightUpdateGroup(
                    name=body.group_name,
                    address=body.master_address,
                    port=body.master_port,
                    rank=body.rank_offset + replica,
                    world_size=body.world_size,
                    backend=body.backend,
                )
            )
            return 0

        return await self._update(init)

    async def update_weights_from_distributed(self, _http: Request, value: Any) -> Any:
        body = parse_body(UpdateWeightsFromDistributedBody, value)
        version, mode = self._version(body.weight_version), _mode(body.abort_all_requests)
        if body.load_format == "flattened_bucket":
            raise ApiError(
                "load_format 'flattened_bucket' is not supported: send tensors one by one"
            )
        counts = {len(body.names), len(body.dtypes), len(body.shapes)}
        if len(counts) > 1:
            raise ApiError(
                "names, dtypes and shapes must have the same length, got "
                f"{len(body.names)}, {len(body.dtypes)} and {len(body.shapes)}"
            )
        rows = zip(body.names, body.dtypes, body.shapes, strict=True)
        tensors = [TensorSpec(name=n, dtype=d, shape=tuple(s)) for n, d, s in rows]
        return await self._update(
            lambda weights, _: weights.update_from_distributed(
                body.group_name, tensors, version=version, mode=mode
            )
        )

    async def destroy_weights_update_group(self, _http: Request, value: Any) -> Any:
        body = parse_body(DestroyWeightsUpdateGroupBody, value)

        def destroy(weights: WeightUpdater, _: int) -> int:
            weights.destroy_group(body.group_name)
            return 0

        return await self._update(destroy)

    async def update_weight_version(self, _http: Request, value: Any) -> Any:
        body = parse_body(UpdateWeightVersionBody, value)
        version = self._version(body.new_version)
        mode: PauseMode = "in_place" if body.abort_all_requests is False else "abort"
        await self._on_every_engine(
            lambda engine: engine.update_weights(lambda _: None, version, mode)
        )
        return {"success": True, "message": "done", "new_version": body.new_version}

    async def get_weights_by_name(self, _http: Request, value: Any) -> Any:
        body = parse_body(GetWeightsByNameBody, value)
        found = await asyncio.to_thread(
            _call, lambda: self._weights()[0].get_weights_by_name(body.name, body.truncate_size)
        )
        return json_response(found)

    async def check_weights(self, _http: Request, value: Any) -> Any:
        action = parse_body(CheckWeightsBody, value).action or "checksum"
        if action != "checksum":
            raise ApiError(f"action must be 'checksum', got {action!r:.80}", param="action")
        updaters = await asyncio.gather(
            *(asyncio.to_thread(weights.checksums) for weights in self._weights())
        )
        return {
            "success": True,
            "message": f"{len(updaters[0])} tensors",
            "ranks": [{"rank": i, "checksums": dict(sums)} for i, sums in enumerate(updaters)],
            "per_engine_checksum": [_digest(sums) for sums in updaters],
        }

    # --- helpers ----------------------------------------------------------------------------------

    def _weights(self) -> tuple[WeightUpdater, ...]:
        if not self.weights:
            raise ApiError("this server was started without a way to update its weights")
        return self.weights

    def _version(self, timeout: str | None) -> int:
        """The version of an update; the next number if the client gives none."""
        newest = max(engine.version for engine in self.service.replicas.engines)
        return self.service.labels.version_of(timeout, newest=newest)

    async def _update(self, change: Callable[[WeightUpdater, int], int]) -> Response:
        """Update all engines concurrently: in a process group all must take part."""
        updaters, loop = self._weights(), asyncio.get_running_loop()
        # One thread per engine: an engine without a thread would block the others in a collective.
        threads = ThreadPoolExecutor(len(updaters))
        try:
            async with self._update_lock:
                outcomes = await asyncio.gather(
                    *(loop.run_in_executor(threads, change, w, i) for i, w in enumerate(updaters)),
                    return_exceptions=True,
                )
        finally:
            threads.shutdown(wait=False)
        for outcome in outcomes:
            if isinstance(outcome, ValueError | OSError):
                return json_response({"success": False, "message": str(outcome)}, status=400)
            if isinstance(outcome, BaseException):
                raise outcome
        running = sum(outcome for outcome in outcomes if isinstance(outcome, int))
        return json_response({"success": True, "message": "done", "num_paused_requests": running})

    async def _on_every_engine(self, action: Callable[[Engine], _T]) -> list[_T]:
        """Run `action` on every engine in threads: an engine responds only between two steps."""
        engines = self.service.replicas.engines
        return list(await asyncio.gather(*(asyncio.to_thread(action, each) for each in engines)))


def _mode(abort: bool | None) -> PauseMode:
    return "abort" if abort else "in_place"


def _call(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except ValueError as error:
        raise ApiError(str(error)) from None


def _digest(sums: Any) -> str:
    text = "".join(f"{name}={sums[name]};" for name in sorted(sums))
    return blake2b(text.encode(), digest_size=16).hexdigest()
