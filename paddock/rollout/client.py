"""Inference client: the token-in-token-out interface between rollouts and engines.

A request has exact token ids, and so has its output, each with its log-probability and the weight
version that sampled it. An engine in this process, a server and a pool of servers look the same.
"""

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from paddock.records import OutputDelta, RequestOutput, SamplingParams


class EngineUnavailableError(Exception):
    """No output: an engine or its connection failed or timed out. Another may be tried."""


class RequestRejectedError(ValueError):
    """No engine can serve this request; the message has the numbers."""


class OverlongPromptError(RequestRejectedError):
    """The prompt exceeds the context length: the only rejection caused by the policy."""


class InvalidModelResponseError(ValueError):
    """A server's response cannot be trained on; the run must end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferenceRequest:
    """A prompt as token ids, with sampling parameters."""

    token_ids: Sequence[int]
    sampling_params: SamplingParams
    session_id: str  # requests of a session go to the replica with its prefix cache
    id: str = ""  # of the request; empty: chosen by the engine
    return_routing: bool = False  # return the routed experts of each token


class InferenceClient(Protocol):
    """Generates tokens. A request is aborted when its task is cancelled or its stream is closed
    early. Raises EngineUnavailableError or RequestRejectedError."""

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        """The complete output."""

    def stream(self, request: InferenceRequest) -> AsyncGenerator[OutputDelta, None]:
        """Deltas as they are sampled; the last one has the complete output."""

    def end_session(self, session: str) -> None:
        """The session is over: free what is kept for it."""

    def unavailable_reason(self) -> str:
        """Why no engine is available now; empty if one is."""


def final_delta(output: RequestOutput) -> OutputDelta:
    """A complete output as the only delta of a stream."""
    done = output.completion
    version = done.versions[-1].version if done.versions else 0
    return OutputDelta(
        token_ids=done.token_ids, logprobs=done.logprobs, version=version, output=output
    )


class StatelessClient:
    """Base of clients without state between requests."""

    def end_session(self, session: str) -> None:
        pass

    def unavailable_reason(self) -> str:
        return ""


class NonStreamingClient(StatelessClient):
    """Base of clients that do not stream: `stream` yields a single delta."""

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        raise NotImplementedError

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[OutputDelta, None]:
        yield final_delta(await self.generate(request))


class AsyncEngine(Protocol):
    """The methods used of an engine in this process."""

    async def async_generate(self, request: Any) -> Any: ...
    def stream(self, request: Any) -> AsyncGenerator[Any, None]: ...


@dataclass(frozen=True)
class InProcessClient(StatelessClient):
    """An engine in this process. This package imports no engine, so its classes are passed:

    InProcessClient(engine, Request, overlong_errors=(ContextLengthExceededError,),
                    rejection_errors=(InvalidRequestError,), engine_errors=(EngineError,))
    """

    engine: AsyncEngine
    request_type: Callable[..., Any]
    overlong_errors: tuple[type[Exception], ...] = field(
        kw_only=True
    )  # may be subclasses of the rejections
    rejection_errors: tuple[type[Exception], ...] = field(kw_only=True)
    engine_errors: tuple[type[Exception], ...] = field(kw_only=True)

    async def generate(self, request: InferenceRequest) -> RequestOutput:
        try:
            output: RequestOutput = await self.engine.async_generate(self._request(request))
        except self.overlong_errors as error:
            raise OverlongPromptError(str(error)) from None
        except self.rejection_errors as error:
            raise RequestRejectedError(str(error)) from None
        except self.engine_errors as error:
            raise EngineUnavailableError(str(error)) from error
        return output

    async def stream(self, request: InferenceRequest) -> AsyncGenerator[OutputDelta, None]:
        try:
            async with aclosing(self.engine.stream(self._request(request))) as deltas:
                async for delta in deltas:
                    yield delta
        except self.overlong_errors as error:
            raise OverlongPromptError(str(error)) from None
        except self.rejection_errors as error:
            raise RequestRejectedError(str(error)) from None
        except self.engine_errors as error:
            raise EngineUnavailableError(str(error)) from error

    def _request(self, request: InferenceRequest) -> Any:
        return self.request_type(
            token_ids=tuple(request.token_ids),
            sampling_params=request.sampling_params,
            id=request.id or None,
            return_routing=request.return_routing,
        )


def turn_seed(seed: int | None, turn: int) -> int | None:
    """The seed of one turn of a rollout.

    Engines sample by (seed, index in the completion): turns with the same seed would repeat
    the same random numbers.

    >>> turn_seed(7, 0) == turn_seed(7, 0) != turn_seed(7, 1), turn_seed(None, 3)
    (True, None)
    """
    if seed is None:
        return None
    digest = blake2b(f"{seed} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SamplingParams.MAX_SEED


def as_int32_array(ids: Sequence[int]) -> "array[int]":
    """Token ids as an int32 array; an array is not copied.

    >>> as_int32_array((1, 2)).itemsize
    4
    """
    return ids if isinstance(ids, array) else array("i", ids)
