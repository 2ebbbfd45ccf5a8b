"""Who is asked for tokens: the seam between a rollout and whatever samples.

A rollout hands over exact token ids and gets back exact token ids, each with its log-probability
and the version of the weights that sampled it. What lies behind the seam (an engine in this
process, a server, a fleet of servers) looks the same.
"""

from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from paddock.api import OutputDeltaLike, RequestOutputLike, TokenLogprobLike
from paddock.records import MAX_SEED, Completion, SamplingParams


class EngineUnavailableError(Exception):
    """No answer came: an engine or the way to it broke, or took too long. Another may be asked."""


class RequestRejectedError(ValueError):
    """No engine could answer this, however often it is asked; the message has the numbers."""


class OverlongPromptError(RequestRejectedError):
    """The conversation has outgrown the context: the only refusal that is the policy's doing."""


class InvalidModelResponseError(ValueError):
    """A server that answers in a way that cannot be trained on; the run must not go on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferenceRequest:
    """A prompt in tokens, and what is wanted of it."""

    token_ids: Sequence[int]
    sampling_params: SamplingParams
    session_id: str  # asks of one session go where its prefix is cached
    id: str = ""  # of the request; empty: whoever answers gives it one
    return_routing: bool = False  # the experts that each token chose are wanted too


class InferenceClient(Protocol):
    """Answers asks. Both ways of asking end the request when nobody waits any more: when the task
    is cancelled, or the stream closed early. Raises EngineLost or AskRefused."""

    async def generate(self, ask: InferenceRequest) -> RequestOutputLike:
        """The whole answer."""

    def stream(self, ask: InferenceRequest) -> AsyncGenerator[OutputDeltaLike, None]:
        """What is new, as it comes; the last delta carries the answer."""

    def end_session(self, session: str) -> None:
        """The session asks no more: nothing need be kept for it."""

    def unavailable_reason(self) -> str:
        """Why nobody could answer at this moment; nothing: somebody could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """An answer by anyone but the embedded engine, whose own has the same looks."""

    completion: Completion
    prompt_tokens: int = 0
    id: str = ""
    matched_stop: int | str | None = None  # the stop token or text that ended it
    abort_reason: str = ""  # why it was aborted
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: Sequence[float | None] = ()
    prompt_top_logprobs: Sequence[TokenLogprobLike | None] = ()
    prompt_requested_logprobs: Sequence[TokenLogprobLike | None] = ()
    top_logprobs: Sequence[TokenLogprobLike] = ()
    requested_logprobs: Sequence[TokenLogprobLike] = ()
    routing: Any = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    verify_steps: int = 0
    e2e_latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """Some of an answer, as it comes."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int
    top_logprobs: Sequence[TokenLogprobLike] = ()
    output: RequestOutputLike | None = None  # with the last one


def final_delta(answer: RequestOutputLike) -> OutputDelta:
    """A whole answer as the only delta of a stream."""
    done = answer.completion
    version = done.versions[-1].version if done.versions else 0
    return OutputDelta(
        token_ids=done.token_ids, logprobs=done.logprobs, version=version, output=answer
    )


class StatelessClient:
    """The base of whoever keeps nothing between asks."""

    def end_session(self, session: str) -> None:
        pass

    def unavailable_reason(self) -> str:
        return ""


class NonStreamingClient(StatelessClient):
    """The base of whoever answers in one piece: a stream is then a single delta."""

    async def generate(self, ask: InferenceRequest) -> RequestOutputLike:
        raise NotImplementedError

    async def stream(self, ask: InferenceRequest) -> AsyncGenerator[OutputDeltaLike, None]:
        yield final_delta(await self.generate(ask))


class AsyncEngine(Protocol):
    """What is needed of an engine in this process."""

    async def async_generate(self, request: Any) -> Any: ...
    def stream(self, request: Any) -> AsyncGenerator[Any, None]: ...


@dataclass(frozen=True)
class InProcessClient(StatelessClient):
    """An engine in this process. This room knows no engine, so its own classes are handed in:

    InProcess(engine, Request, overlong=(ContextExceeded,), refusals=(RequestRefused,),
              failures=(EngineFailed,))
    """

    engine: AsyncEngine
    request_type: Callable[..., Any]
    overlong_errors: tuple[type[Exception], ...] = field(kw_only=True)  # may be among the refusals
    rejection_errors: tuple[type[Exception], ...] = field(kw_only=True)
    engine_errors: tuple[type[Exception], ...] = field(kw_only=True)

    async def generate(self, ask: InferenceRequest) -> RequestOutputLike:
        try:
            answer: RequestOutputLike = await self.engine.async_generate(self._request(ask))
        except self.overlong_errors as error:
            raise OverlongPromptError(str(error)) from None
        except self.rejection_errors as error:
            raise RequestRejectedError(str(error)) from None
        except self.engine_errors as error:
            raise EngineUnavailableError(str(error)) from error
        return answer

    async def stream(self, ask: InferenceRequest) -> AsyncGenerator[OutputDeltaLike, None]:
        try:
            async with aclosing(self.engine.stream(self._request(ask))) as deltas:
                async for delta in deltas:
                    yield delta
        except self.overlong_errors as error:
            raise OverlongPromptError(str(error)) from None
        except self.rejection_errors as error:
            raise RequestRejectedError(str(error)) from None
        except self.engine_errors as error:
            raise EngineUnavailableError(str(error)) from error

    def _request(self, ask: InferenceRequest) -> Any:
        return self.request_type(
            token_ids=tuple(ask.token_ids),
            sampling_params=ask.sampling_params,
            id=ask.id or None,
            return_routing=ask.return_routing,
        )


def turn_seed(seed: int | None, turn: int) -> int | None:
    """The seed of one turn of an attempt. Engines draw by (seed, index in the reply), so turns that
    shared a seed would share their luck.

    >>> turn_seed(7, 0) == turn_seed(7, 0) != turn_seed(7, 1), turn_seed(None, 3)
    (True, None)
    """
    if seed is None:
        return None
    digest = blake2b(f"{seed} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % MAX_SEED


def as_int32_array(ids: Sequence[int]) -> "array[int]":
    """Token ids, four bytes each; an array is not copied.

    >>> as_int32_array((1, 2)).itemsize
    4
    """
    return ids if isinstance(ids, array) else array("i", ids)
