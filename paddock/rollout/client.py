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

from paddock.api.delta_parser import OutputDeltaLike, RequestOutputLike
from paddock.api.token_decoder import TokenLogprobLike
from paddock.records import Completion, SamplingParams
from paddock.records.sampling_params import MAX_SEED


class EngineLost(Exception):
    """No answer came: an engine or the way to it broke, or took too long. Another may be asked."""


class AskRefused(ValueError):
    """No engine could answer this, however often it is asked; the message has the numbers."""


class ContextFull(AskRefused):
    """The conversation has outgrown the context: the only refusal that is the policy's doing."""


class BadReply(ValueError):
    """A server that answers in a way that cannot be trained on; the run must not go on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """A prompt in tokens, and what is wanted of it."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    session: str  # asks of one session go where its prefix is cached
    id: str = ""  # of the request; empty: whoever answers gives it one
    replay: bool = False  # the experts that each token chose are wanted too


class Generate(Protocol):
    """Answers asks. Both ways of asking end the request when nobody waits any more: when the task
    is cancelled, or the stream closed early. Raises EngineLost or AskRefused."""

    async def respond(self, ask: Ask) -> RequestOutputLike:
        """The whole answer."""

    def stream(self, ask: Ask) -> AsyncGenerator[OutputDeltaLike, None]:
        """What is new, as it comes; the last delta carries the answer."""

    def end(self, session: str) -> None:
        """The session asks no more: nothing need be kept for it."""

    def trouble(self) -> str:
        """Why nobody could answer at this moment; nothing: somebody could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer by anyone but the embedded engine, whose own has the same looks."""

    completion: Completion
    prompt_tokens: int = 0
    id: str = ""
    matched: int | str | None = None  # the stop token or text that ended it
    message: str = ""  # why it was aborted
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    retractions: int = 0
    prompt_logprobs: Sequence[float | None] = ()
    prompt_top: Sequence[TokenLogprobLike | None] = ()
    prompt_asked: Sequence[TokenLogprobLike | None] = ()
    top: Sequence[TokenLogprobLike] = ()
    asked: Sequence[TokenLogprobLike] = ()
    replay: Any = None
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    verify_steps: int = 0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Some of an answer, as it comes."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int
    top: Sequence[TokenLogprobLike] = ()
    answer: RequestOutputLike | None = None  # with the last one


def last_delta(answer: RequestOutputLike) -> Said:
    """A whole answer as the only delta of a stream."""
    done = answer.completion
    version = done.versions[-1].version if done.versions else 0
    return Said(token_ids=done.token_ids, logprobs=done.logprobs, version=version, answer=answer)


class Forgets:
    """The base of whoever keeps nothing between asks."""

    def end(self, session: str) -> None:
        pass

    def trouble(self) -> str:
        return ""


class Whole(Forgets):
    """The base of whoever answers in one piece: a stream is then a single delta."""

    async def respond(self, ask: Ask) -> RequestOutputLike:
        raise NotImplementedError

    async def stream(self, ask: Ask) -> AsyncGenerator[OutputDeltaLike, None]:
        yield last_delta(await self.respond(ask))


class Embedded(Protocol):
    """What is needed of an engine in this process."""

    async def respond(self, request: Any) -> Any: ...
    def stream(self, request: Any) -> AsyncGenerator[Any, None]: ...


@dataclass(frozen=True)
class InProcess(Forgets):
    """An engine in this process. This room knows no engine, so its own classes are handed in:

    InProcess(engine, Request, overlong=(ContextExceeded,), refusals=(RequestRefused,),
              failures=(EngineFailed,))
    """

    engine: Embedded
    request: Callable[..., Any]
    overlong: tuple[type[Exception], ...] = field(kw_only=True)  # may be among the refusals
    refusals: tuple[type[Exception], ...] = field(kw_only=True)
    failures: tuple[type[Exception], ...] = field(kw_only=True)

    async def respond(self, ask: Ask) -> RequestOutputLike:
        try:
            answer: RequestOutputLike = await self.engine.respond(self._request(ask))
        except self.overlong as error:
            raise ContextFull(str(error)) from None
        except self.refusals as error:
            raise AskRefused(str(error)) from None
        except self.failures as error:
            raise EngineLost(str(error)) from error
        return answer

    async def stream(self, ask: Ask) -> AsyncGenerator[OutputDeltaLike, None]:
        try:
            async with aclosing(self.engine.stream(self._request(ask))) as deltas:
                async for delta in deltas:
                    yield delta
        except self.overlong as error:
            raise ContextFull(str(error)) from None
        except self.refusals as error:
            raise AskRefused(str(error)) from None
        except self.failures as error:
            raise EngineLost(str(error)) from error

    def _request(self, ask: Ask) -> Any:
        return self.request(
            token_ids=tuple(ask.token_ids),
            sampling=ask.sampling,
            id=ask.id or None,
            replay=ask.replay,
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


def int32(ids: Sequence[int]) -> "array[int]":
    """Token ids, four bytes each; an array is not copied.

    >>> int32((1, 2)).itemsize
    4
    """
    return ids if isinstance(ids, array) else array("i", ids)
