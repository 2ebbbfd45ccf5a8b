"""Servers far away, over SGLang's `/generate`: our own, or any that speaks it."""

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

from paddock.api import OutputDeltaLike, RequestOutputLike, sglang_client
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

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"  # says which session a request belongs to
_JSON = {"Content-Type": "application/json"}
_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def connection_pool() -> ConnectionPool:
    """The connections that servers share, to be closed in the end."""
    return ConnectionPool()


@dataclass(frozen=True, slots=True)
class ServerClient:
    """One server's address, and how long it may be silent."""

    url: str
    http: ConnectionPool
    api_key: str | None = None
    timeout_s: float = 600.0

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """The JSON value it answers."""
        async with self._sent(path, body, headers) as response:
            return _value(await response.read())

    async def stream_events(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """The JSON values of a stream of events."""
        async with (
            self._sent(path, body, headers) as response,
            aclosing(response.iter_lines()) as lines,
        ):
            async for line in lines:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield _value(line[5:])

    async def check_health(self, patience_s: float) -> bool:
        """Whether it says so in time."""
        asked = self.http.request(
            "GET", f"{self.url}/health", headers=self._headers(), patience_s=patience_s
        )
        try:
            async with asyncio.timeout(patience_s), asked as response:
                await response.read()
                return response.status == 200
        except (OSError, EOFError):
            return False

    @asynccontextmanager
    async def _sent(
        self, path: str, body: Any, headers: dict[str, str] | None
    ) -> AsyncIterator[PooledResponse]:
        sent = self.http.request(
            "POST",
            self.url + path,
            headers=self._headers() | (headers or {}),
            body=orjson.dumps(body, option=_NUMPY),
            patience_s=self.timeout_s,
        )
        try:
            async with sent as response:
                if response.status != 200:
                    raise _complaint(self.url, response.status, await response.read())
                yield response
        except TimeoutError:
            raise EngineUnavailableError(
                f"{self.url}: nothing within {self.timeout_s:g} s"
            ) from None
        except (OSError, EOFError) as error:
            raise EngineUnavailableError(f"{self.url}: {type(error).__name__}: {error}") from error

    def _headers(self) -> dict[str, str]:
        return _JSON | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


def _value(data: bytes) -> Any:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise EngineUnavailableError(f"an answer that is no JSON: {data[:80]!r}") from None
    if isinstance(value, dict) and isinstance(value.get("error"), dict):
        error = value["error"]  # in the middle of a stream
        status = error.get("code") if isinstance(error.get("code"), int) else 500
        raise _complaint("the server", status, data)
    return value


def _complaint(url: str, status: int, data: bytes) -> Exception:
    """What a server said instead of an answer: whether another could do better."""
    try:
        said = orjson.loads(data)
        error = said.get("error", said)
        message = error.get("message") if isinstance(error, dict) else error
    except (orjson.JSONDecodeError, AttributeError):
        message = data[:200].decode(errors="replace")
    text = f"{url}: {status}: {str(message)[:500]}"
    if status == 413 or (status in (400, 422) and "context length" in text):
        return OverlongPromptError(text)  # in the words of SGLang, vLLM and our own server
    if status == 400 and "request id" in text.lower():
        return EngineUnavailableError(text)  # SGLang says so of an id that is in use
    return RequestRejectedError(text) if status in (400, 422) else EngineUnavailableError(text)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The experts that each token but the last chose, in each layer that has any."""

    expert_TLK: np.ndarray


class SGLangClient(StatelessClient):
    """A server's `/generate`. `context`, its context length, is needed where asks do not say how
    many tokens they want; `experts`, layers that have them and how many a token chooses, where asks
    want to know which."""

    def __init__(
        self,
        server: ServerClient,
        *,
        context: int | None = None,
        experts: tuple[int, int] | None = None,
    ) -> None:
        self.server, self.context, self.experts = server, context, experts

    async def generate(self, ask: InferenceRequest) -> RequestOutputLike:
        payload = await self.server.post("/generate", self._body(ask), self._headers(ask))
        return self._answer(ask, _read(payload))

    async def stream(self, ask: InferenceRequest) -> AsyncGenerator[OutputDeltaLike, None]:
        so_far: sglang_client.GenerateOutput | None = None
        body = self._body(ask) | {"stream": True}
        async for payload in self.server.stream_events("/generate", body, self._headers(ask)):
            before, so_far = so_far, _read(payload, so_far)
            new = len(before.token_ids) if before else 0
            if new == len(so_far.token_ids) and so_far.finish is None:
                continue
            yield OutputDelta(
                token_ids=so_far.token_ids[new:],
                logprobs=so_far.logprobs[new:],
                version=so_far.versions[-1].version if so_far.versions else 0,
                output=None if so_far.finish is None else self._answer(ask, so_far),
            )
        if so_far is None or so_far.finish is None:
            raise EngineUnavailableError(f"{self.server.url}: the stream broke off")

    def _headers(self, ask: InferenceRequest) -> dict[str, str]:
        # A header holds printable ASCII only; the session's name is the rollout's own business.
        return {ROUTING_KEY_HEADER: ask.session_id.encode("ascii", "backslashreplace").decode()}

    def _body(self, ask: InferenceRequest) -> dict[str, Any]:
        sampling = ask.sampling_params
        if sampling.max_new_tokens is None:
            if self.context is None:
                raise RequestRejectedError(
                    "max_new_tokens: not said, and the server's context is not known"
                )
            room = self.context - len(ask.token_ids)
            if room < 1:
                raise OverlongPromptError(
                    f"{len(ask.token_ids)} tokens leave no room in {self.context}"
                )
            sampling = replace(sampling, max_new_tokens=room)
        body: dict[str, Any] = {
            "input_ids": np.frombuffer(as_int32_array(ask.token_ids), dtype=np.int32),
            "sampling_params": sglang_client.to_sglang_sampling_params(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
        }
        if ask.id:
            body["rid"] = ask.id
        if sampling.thinking_budget is not None:
            body["max_thinking_tokens"] = sampling.thinking_budget
        if ask.return_routing:
            body["return_routed_experts"] = True
        return body

    def _answer(self, ask: InferenceRequest, done: sglang_client.GenerateOutput) -> RequestOutput:
        return RequestOutput(
            completion=done.completion,
            prompt_tokens=done.prompt_tokens or len(ask.token_ids),
            id=ask.id,
            matched_stop=done.matched,
            abort_reason=done.message,
            cached_tokens=done.cached_tokens,
            routing=self._routed(ask, done),
        )

    def _routed(
        self, ask: InferenceRequest, done: sglang_client.GenerateOutput
    ) -> RoutedExperts | None:
        if done.routed_experts is None or self.experts is None:
            return None
        flat = np.frombuffer(b64decode(done.routed_experts), dtype="<i4")
        shape = (len(ask.token_ids) + len(done.token_ids) - 1, *self.experts)
        if flat.size != np.prod(shape):
            raise InvalidModelResponseError(
                f"routed_experts: {flat.size} numbers, but {shape} are expected"
            )
        return RoutedExperts(flat.reshape(shape))


def _read(
    payload: Any, before: sglang_client.GenerateOutput | None = None
) -> sglang_client.GenerateOutput:
    try:
        return sglang_client.parse_generate_output(payload, before)
    except (ApiError, ValueError, TypeError, IndexError) as error:
        raise InvalidModelResponseError(
            f"a server's answer cannot be trained on: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class HttpLogprobScorer:
    """Log-probabilities of given tokens, by a server: a teacher's, say."""

    server: ServerClient

    async def __call__(self, token_ids: Sequence[int], start: int) -> tuple[float, ...]:
        """Of `token_ids[start:]`, at temperature 1. `start` is at least 1: nothing stands before
        the first token to predict it from."""
        if not 1 <= start < len(token_ids):
            raise RequestRejectedError(f"start: {start} is not in [1, {len(token_ids)})")
        body = {
            "input_ids": list(token_ids),
            "sampling_params": sglang_client.to_sglang_sampling_params(
                SamplingParams(max_new_tokens=1)
            )
            | {"max_new_tokens": 0},
            "return_logprob": True,
            # SGLang begins one token later than it is told: what it is told is the context.
            "logprob_start_len": start - 1,
        }
        payload = await self.server.post("/generate", body)
        try:
            return sglang_client.parse_prompt_logprobs(payload, start, len(token_ids) - start)
        except (ApiError, TypeError, IndexError) as error:
            raise InvalidModelResponseError(f"a server's scores cannot be read: {error}") from error


AwaitReplica = Callable[[str, Awaitable[Any]], Awaitable[Any]]


async def _patiently(_name: str, work: Awaitable[Any]) -> Any:
    return await work


@dataclass(slots=True)
class HttpWeightPublisher:
    """New weights for every server, as safetensors bytes. The last whole version is kept, for
    servers that join later."""

    servers: dict[str, ServerClient]
    # Waits for what a server answers no longer than the server is alive: a fleet's `while_alive`.
    await_replica: AwaitReplica = _patiently
    version: int | None = None
    _parcels: tuple[str, ...] = field(default=(), repr=False)

    async def update_weights(self, parcels: Iterable[bytes], version: int) -> dict[str, str]:
        """Hand one whole version to all at once; what went wrong, by server. A server refuses what
        is damaged or not whole and goes on with the weights it has."""
        self._parcels, self.version = tuple(b64encode(p).decode() for p in parcels), version
        return await self._send(list(self.servers), self.await_replica)

    async def sync_replica(self, name: str) -> bool:
        """Give a server that has just joined the last version; whether it has it now."""
        return self.version is None or not await self._send([name], _patiently)

    async def _send(self, names: Sequence[str], wait: AwaitReplica) -> dict[str, str]:
        body = {
            "serialized_named_tensors": list(self._parcels),
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

        told = await asyncio.gather(*map(send, names))
        return {name: why for name, why in zip(names, told, strict=True) if why}
