"""Client of SGLang-compatible servers: `/generate`, scoring, weight sync over HTTP."""

import asyncio
from base64 import b64decode, b64encode
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from paddock.api import sglang_client
from paddock.http import ConnectionPool, PooledResponse
from paddock.records import ApiError, SamplingParams
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceRequest,
    InvalidModelResponseError,
    OutputDelta,
    OverlongPromptError,
    RequestOutput,
    RequestRejectedError,
    StatelessClient,
    as_int32_array,
)

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"  # session id, for session-affine routing
_JSON = {"Content-Type": "application/json"}
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def connection_pool() -> ConnectionPool:
    """A connection pool for all servers; the caller closes it."""
    return ConnectionPool()


@dataclass(frozen=True, slots=True)
class ServerClient:
    """URL, API key and timeout of one server."""

    url: str
    http: ConnectionPool
    api_key: str | None = None
    timeout_s: float = 600.0

    async def get(self, path: str) -> Any:
        """The JSON value at a path."""
        async with self._sent("GET", path, b"", None) as response:
            return _value(await response.read())

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """POST a JSON body; the JSON value of the response."""
        async with self._sent("POST", path, _json(body), headers) as response:
            return _value(await response.read())

    async def stream_events(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """POST a JSON body; the JSON values of the server-sent events."""
        async with (
            self._sent("POST", path, _json(body), headers) as response,
            aclosing(response.iter_lines()) as lines,
        ):
            async for line in lines:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield _value(line[5:])

    async def check_health(self, timeout_s: float) -> bool:
        """Whether `/health` responds with 200 in time."""
        request = self.http.request(
            "GET", f"{self.url}/health", headers=self._headers(), timeout_s=timeout_s
        )
        try:
            async with asyncio.timeout(timeout_s), request as response:
                await response.read()
                return response.status == 200
        except (OSError, EOFError):
            return False

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: bytes, headers: dict[str, str] | None
    ) -> AsyncIterator[PooledResponse]:
        sent = self.http.request(
            method,
            self.url + path,
            headers=self._headers() | (headers or {}),
            body=body,
            timeout_s=self.timeout_s,
        )
        try:
            async with sent as response:
                if response.status != 200:
                    raise _error_response(self.url, response.status, await response.read())
                yield response
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url}: no response within {self.timeout_s:g} s"
            ) from None
        except (OSError, EOFError) as error:
            raise EngineUnavailableError(f"{self.url}: {type(error).__name__}: {error}") from error

    def _headers(self) -> dict[str, str]:
        return _JSON | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


def _json(body: Any) -> bytes:
    return orjson.dumps(body, option=_NUMPY)


def _value(data: bytes) -> Any:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise EngineUnavailableError(f"response is not JSON: {data[:80]!r}") from None
    if isinstance(value, dict) and isinstance(value.get("error"), dict):
        error = value["error"]  # within a stream
        status = error.get("code") if isinstance(error.get("code"), int) else 500
        raise _error_response("the server", status, data)
    return value


def _error_response(url: str, status: int, data: bytes) -> Exception:
    """The exception of an error response: rejected, or worth trying another server."""
    try:
        body = orjson.loads(data)
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
    except (orjson.JSONDecodeError, AttributeError):
        message = data[:200].decode(errors="replace")
    text = f"{url}: {status}: {str(message)[:500]}"
    if status == 413 or (status in (400, 422) and "context length" in text):
        return OverlongPromptError(text)  # the message of SGLang, vLLM and our server
    if status == 400 and "request id" in text.lower():
        return EngineUnavailableError(text)  # SGLang: the request id is in use
    return RequestRejectedError(text) if status in (400, 422) else EngineUnavailableError(text)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """Routed experts of each token but the last, in each MoE layer."""

    expert_TLK: np.ndarray


class SGLangClient(StatelessClient):
    """InferenceClient for `/generate` of a server.

    `context`: its context length, needed for requests without `max_new_tokens`. `experts`: number
    of MoE layers and experts per token, needed for requests with `return_routing`.
    """

    def __init__(
        self,
        server: ServerClient,
        *,
        context: int | None = None,
        experts: tuple[int, int] | None = None,
    ) -> None:
        self.server, self.context, self.experts = server, context, experts

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        payload = await self.server.post("/generate", self._body(request), self._headers(request))
        return self._output(request, _read(payload))

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[OutputDelta, None]:
        received: sglang_client.GenerateOutput | None = None
        body = self._body(request) | {"stream": True}
        async for payload in self.server.stream_events("/generate", body, self._headers(request)):
            before, received = received, _read(payload, received)
            new = len(before.token_ids) if before else 0
            if new == len(received.token_ids) and received.finish is None:
                continue
            yield OutputDelta(
                token_ids=received.token_ids[new:],
                logprobs=received.logprobs[new:],
                version=received.versions[-1].version if received.versions else 0,
                output=None if received.finish is None else self._output(request, received),
            )
        if received is None or received.finish is None:
            raise EngineUnavailableError(f"{self.server.url}: the stream broke off")

    def _headers(self, request: InferenceRequest) -> dict[str, str]:
        # A header holds printable ASCII only; a session id may hold anything.
        return {ROUTING_KEY_HEADER: request.session_id.encode("ascii", "backslashreplace").decode()}

    def _body(self, request: InferenceRequest) -> dict[str, Any]:
        sampling = request.sampling_params
        if sampling.max_new_tokens is None:
            if self.context is None:
                raise RequestRejectedError(
                    "max_new_tokens must be set: the context length of the server is unknown"
                )
            left = self.context - len(request.token_ids)
            if left < 1:
                raise OverlongPromptError(
                    f"prompt of {len(request.token_ids)} tokens, context length {self.context}:"
                    " no room for a reply"
                )
            sampling = replace(sampling, max_new_tokens=left)
        body: dict[str, Any] = {
            "input_ids": np.frombuffer(as_int32_array(request.token_ids), dtype=np.int32),
            "sampling_params": sglang_client.to_sglang_sampling_params(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
        }
        if request.id:
            body["rid"] = request.id
        if sampling.thinking_budget is not None:
            body["max_thinking_tokens"] = sampling.thinking_budget
        if request.return_routing:
            body["return_routed_experts"] = True
        return body

    def _output(
        self, request: InferenceRequest, done: sglang_client.GenerateOutput
    ) -> RequestOutput:
        return RequestOutput(
            completion=done.completion,
            prompt_tokens=done.prompt_tokens or len(request.token_ids),
            id=request.id,
            matched_stop=done.matched,
            abort_reason=done.message,
            cached_tokens=done.cached_tokens,
            routing=self._routed(request, done),
        )

    def _routed(
        self, request: InferenceRequest, done: sglang_client.GenerateOutput
    ) -> RoutedExperts | None:
        if done.routed_experts is None or self.experts is None:
            return None
        flat = np.frombuffer(b64decode(done.routed_experts), dtype="<i4")
        shape = (len(request.token_ids) + len(done.token_ids) - 1, *self.experts)
        if flat.size != np.prod(shape):
            raise InvalidModelResponseError(
                f"routed_experts: expected shape {shape}, got {flat.size} numbers"
            )
        return RoutedExperts(flat.reshape(shape))


def _read(
    payload: Any, before: sglang_client.GenerateOutput | None = None
) -> sglang_client.GenerateOutput:
    try:
        return sglang_client.parse_generate_output(payload, before)
    except (ApiError, ValueError, TypeError, IndexError) as error:
        raise InvalidModelResponseError(f"invalid response of a server: {error}") from error


@dataclass(frozen=True, slots=True)
class HttpLogprobScorer:
    """Scores tokens with a server, for example a teacher."""

    server: ServerClient

    async def __call__(self, token_ids: Sequence[int], start: int) -> tuple[float, ...]:
        """Log-probabilities of `token_ids[start:]` at temperature 1. `start` must be at least 1:
        the first token has no context."""
        if not 1 <= start < len(token_ids):
            raise RequestRejectedError(f"start: {start} is not in [1, {len(token_ids)})")
        body = {
            "input_ids": list(token_ids),
            "sampling_params": sglang_client.to_sglang_sampling_params(
                SamplingParams(max_new_tokens=1)
            )
            | {"max_new_tokens": 0},
            "return_logprob": True,
            # SGLang starts one token after `logprob_start_len`.
            "logprob_start_len": start - 1,
        }
        payload = await self.server.post("/generate", body)
        try:
            return sglang_client.parse_prompt_logprobs(payload, start, len(token_ids) - start)
        except (ApiError, TypeError, IndexError) as error:
            raise InvalidModelResponseError(f"invalid scores of a server: {error}") from error


AwaitReplica = Callable[[str, Awaitable[Any]], Awaitable[Any]]


async def _without_deadline(_name: str, work: Awaitable[Any]) -> Any:
    return await work


@dataclass(slots=True)
class HttpWeightPublisher:
    """Weight sync: sends new weights to all servers as safetensors bytes. The last complete version
    is kept for servers that join later."""

    servers: dict[str, ServerClient]
    # Awaits a response only while the server is healthy: `ReplicaPool.while_alive`.
    await_replica: AwaitReplica = _without_deadline
    version: int | None = None
    _chunks: tuple[str, ...] = field(default=(), repr=False)

    async def update_weights(self, chunks: Iterable[bytes], version: int) -> dict[str, str]:
        """Send one complete version to all servers concurrently; errors by server.

        A server rejects damaged or incomplete weights and keeps the ones it has.
        """
        self._chunks, self.version = tuple(b64encode(p).decode() for p in chunks), version
        return await self._send(list(self.servers), self.await_replica)

    async def sync_replica(self, name: str) -> bool:
        """Send the last version to a server that has just joined; whether it succeeded."""
        return self.version is None or not await self._send([name], _without_deadline)

    async def _send(self, names: Sequence[str], wait: AwaitReplica) -> dict[str, str]:
        body = {
            "serialized_named_tensors": list(self._chunks),
            "weight_version": str(self.version),
            "abort_all_requests": False,
            "flush_cache": False,
        }

        async def send(name: str) -> str:
            try:
                await wait(name, self.servers[name].post("/update_weights_from_tensor", body))
            except (EngineUnavailableError, RequestRejectedError) as error:
                return str(error)
            return ""

        errors = await asyncio.gather(*map(send, names))
        return {name: why for name, why in zip(names, errors, strict=True) if why}
