"""Caches, aborts, pauses and weights: SGLang's control routes, guarded by the admin key."""

import asyncio
from base64 import b64decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, TypeVar, get_args

from starlette.requests import Request
from starlette.responses import Response

from paddock.api.body import RequestBody, parse_body
from paddock.api.dialect import JsonRouter, json_response
from paddock.api.errors import ApiError
from paddock.engine import Engine, PauseMode
from paddock.serve.hall import Hall
from paddock.serve.weights import Group, Sent, Weights

_T = TypeVar("_T")
POLL_S = 0.05


class AbortBody(RequestBody):
    rid: str | None = None
    abort_all: bool | None = None


class PauseBody(RequestBody):
    mode: str | None = None


class DiskBody(RequestBody):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class TensorsBody(RequestBody):
    """Safetensors files in base64; pickle is refused."""

    serialized_named_tensors: list[str]
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class GroupBody(RequestBody):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DistributedBody(RequestBody):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class LeaveBody(RequestBody):
    group_name: str = "weight_update_group"


class VersionBody(RequestBody):
    new_version: str
    abort_all_requests: bool | None = None


class NameBody(RequestBody):
    name: str
    truncate_size: int = 100


class CheckBody(RequestBody):
    action: str | None = None


PATHS = (
    "/flush_cache", "/abort_request", "/pause_generation", "/continue_generation",
    "/update_weights_from_disk", "/update_weights_from_tensor", "/init_weights_update_group",
    "/update_weights_from_distributed", "/destroy_weights_update_group", "/update_weight_version",
    "/get_weights_by_name", "/weights_checker",
)  # fmt: skip


class Control:
    def __init__(self, hall: Hall, weights: Sequence[Weights] = ()) -> None:
        """`weights` are those of the engines, one each; without them weights cannot be changed."""
        self.hall, self.weights = hall, tuple(weights)
        self._changing = asyncio.Lock()  # one change of weights at a time

    def open(self, doors: JsonRouter) -> None:
        both = ("GET", "POST")
        doors.add_route("/flush_cache", self.flush, methods=both)
        doors.add_route("/abort_request", self.abort, body=AbortBody)
        doors.add_route("/pause_generation", self.pause, body=PauseBody)
        doors.add_route("/continue_generation", self.resume)
        doors.add_route("/update_weights_from_disk", self.from_disk, body=DiskBody)
        most = self.hall.settings.weights_bytes
        doors.add_route(
            "/update_weights_from_tensor", self.from_tensors, body=TensorsBody, most=most
        )
        doors.add_route("/init_weights_update_group", self.join, body=GroupBody)
        doors.add_route("/update_weights_from_distributed", self.from_group, body=DistributedBody)
        doors.add_route("/destroy_weights_update_group", self.leave, body=LeaveBody)
        doors.add_route("/update_weight_version", self.rename, body=VersionBody)
        doors.add_route("/get_weights_by_name", self.values, body=NameBody)
        doors.add_route("/weights_checker", self.check, body=CheckBody)

    # --- requests ---------------------------------------------------------------------------------

    async def flush(self, http: Request, _value: Any) -> Response:
        said = http.query_params.get("timeout", "0")
        try:
            left = float(said)
        except ValueError:
            raise ApiError(f"timeout: {said!r:.80} is no number", param="timeout") from None
        while True:
            if all(await self._each(Engine.flush_cache)):
                return json_response({"success": True, "message": "the cache is empty"})
            if not left > 0:
                message = "the cache is in use: requests are waiting or running"
                return json_response({"success": False, "message": message}, status=400)
            await asyncio.sleep(POLL_S)
            left -= POLL_S

    async def abort(self, _http: Request, value: Any) -> Any:
        body = parse_body(AbortBody, value)
        if body.abort_all:
            return {"success": True, "aborted": sum(await self._each(Engine.abort_all))}
        if not body.rid:
            raise ApiError("either 'rid' or 'abort_all' is needed", param="rid")
        return {"success": True, "aborted": self.hall.abort(body.rid)}

    async def pause(self, _http: Request, value: Any) -> Any:
        mode: Any = parse_body(PauseBody, value).mode or "abort"
        if mode not in get_args(PauseMode):
            known = ", ".join(get_args(PauseMode))
            raise ApiError(f"mode: {mode!r:.80} is none of {known}", param="mode")
        await self._each(lambda engine: engine.pause(mode))
        return {"status": "ok", "message": f"paused ({mode})"}

    async def resume(self, _http: Request, _value: Any) -> Any:
        await self._each(Engine.resume)
        return {"status": "ok", "message": "going on"}

    # --- weights ----------------------------------------------------------------------------------

    async def from_disk(self, _http: Request, value: Any) -> Any:
        body = parse_body(DiskBody, value)
        version, mode = self._version(body.weight_version), _mode(body.abort_all_requests)
        return await self._change(
            lambda weights, _: weights.from_disk(body.model_path, version=version, mode=mode)
        )

    async def from_tensors(self, _http: Request, value: Any) -> Any:
        body = parse_body(TensorsBody, value)
        version, mode = self._version(body.weight_version), _mode(body.abort_all_requests)
        try:
            parcels = [b64decode(text, validate=True) for text in body.serialized_named_tensors]
        except ValueError as error:
            raise ApiError(f"serialized_named_tensors: no base64: {error}") from None
        return await self._change(
            lambda weights, _: weights.from_tensors(parcels, version=version, mode=mode)
        )

    async def join(self, _http: Request, value: Any) -> Any:
        body = parse_body(GroupBody, value)

        def join(weights: Weights, replica: int) -> int:
            weights.join(
                Group(
                    name=body.group_name,
                    address=body.master_address,
                    port=body.master_port,
                    rank=body.rank_offset + replica,
                    world_size=body.world_size,
                    backend=body.backend,
                )
            )
            return 0

        return await self._change(join)

    async def from_group(self, _http: Request, value: Any) -> Any:
        body = parse_body(DistributedBody, value)
        version, mode = self._version(body.weight_version), _mode(body.abort_all_requests)
        if body.load_format == "flattened_bucket":
            raise ApiError("load_format: tensors are taken one by one, not as 'flattened_bucket'")
        counts = {len(body.names), len(body.dtypes), len(body.shapes)}
        if len(counts) > 1:
            raise ApiError(
                f"{len(body.names)} names, {len(body.dtypes)} dtypes, {len(body.shapes)} shapes"
            )
        rows = zip(body.names, body.dtypes, body.shapes, strict=True)
        sent = [Sent(name=n, dtype=d, shape=tuple(s)) for n, d, s in rows]
        return await self._change(
            lambda weights, _: weights.from_group(body.group_name, sent, version=version, mode=mode)
        )

    async def leave(self, _http: Request, value: Any) -> Any:
        body = parse_body(LeaveBody, value)

        def leave(weights: Weights, _: int) -> int:
            weights.leave(body.group_name)
            return 0

        return await self._change(leave)

    async def rename(self, _http: Request, value: Any) -> Any:
        body = parse_body(VersionBody, value)
        version = self._version(body.new_version)
        mode: PauseMode = "in_place" if body.abort_all_requests is False else "abort"
        await self._each(lambda engine: engine.update_weights(lambda _: None, version, mode))
        return {"success": True, "message": "done", "new_version": body.new_version}

    async def values(self, _http: Request, value: Any) -> Any:
        body = parse_body(NameBody, value)
        found = await asyncio.to_thread(
            _asked, lambda: self._weights()[0].values(body.name, body.truncate_size)
        )
        return json_response(found)

    async def check(self, _http: Request, value: Any) -> Any:
        action = parse_body(CheckBody, value).action or "checksum"
        if action != "checksum":
            raise ApiError(f"action: {action!r:.80} is not 'checksum'", param="action")
        every = await asyncio.gather(
            *(asyncio.to_thread(weights.checksums) for weights in self._weights())
        )
        return {
            "success": True,
            "message": f"{len(every[0])} tensors",
            "ranks": [{"rank": i, "checksums": dict(sums)} for i, sums in enumerate(every)],
            "per_engine_checksum": [_digest(sums) for sums in every],
        }

    # --- within -----------------------------------------------------------------------------------

    def _weights(self) -> tuple[Weights, ...]:
        if not self.weights:
            raise ApiError("this server was started without a way to change its weights")
        return self.weights

    def _version(self, said: str | None) -> int:
        """The version to come; the next one if nothing is said."""
        newest = max(engine.version for engine in self.hall.replicas.engines)
        return self.hall.labels.version_of(said, newest=newest)

    async def _change(self, change: Callable[[Weights, int], int]) -> Response:
        """Change every engine's weights at once: in a group, all must take part."""
        every, loop = self._weights(), asyncio.get_running_loop()
        # A thread for each of them: one that got none would keep the others waiting in a group.
        threads = ThreadPoolExecutor(len(every))
        try:
            async with self._changing:
                outcomes = await asyncio.gather(
                    *(loop.run_in_executor(threads, change, w, i) for i, w in enumerate(every)),
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

    async def _each(self, act: Callable[[Engine], _T]) -> list[_T]:
        """On every engine, off the event loop: an engine answers between two steps."""
        engines = self.hall.replicas.engines
        return list(await asyncio.gather(*(asyncio.to_thread(act, each) for each in engines)))


def _mode(abort: bool | None) -> PauseMode:
    return "abort" if abort else "in_place"


def _asked(ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except ValueError as error:
        raise ApiError(str(error)) from None


def _digest(sums: Any) -> str:
    text = "".join(f"{name}={sums[name]};" for name in sorted(sums))
    return blake2b(text.encode(), digest_size=16).hexdigest()
